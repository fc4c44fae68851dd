"""Pipeline stages: where a graph may be cut, what crosses, and what each stage keeps."""

from typing import Any

import pytest
from compiled_families import FAMILIES
from sharding import CONTEXT, Model, op_counts

from sitsc.core.errors import PartitionError
from sitsc.core.interpret import relative_error
from sitsc.core.parallel import Partition
from sitsc.core.printer import print_graph
from sitsc.passes.fxutil import arguments, calls
from sitsc.passes.schedule import kv_groups
from sitsc.passes.shard_table import weights_of_rank
from sitsc.passes.stages import CutStage


def _model(traced: Any, family: str, layers: int = 4) -> Model:
    config: dict[str, Any] = FAMILIES[family] | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config |= {"layer_types": (config["layer_types"] * layers)[:layers]}
    return Model(traced(config, "float32"))


def _inputs(graph: Any) -> set[str]:
    return {n.meta["input"] for n in graph.find_nodes(op="placeholder") if "input" in n.meta}


def test_uneven_stages(traced: Any):
    model = _model(traced, "llama")
    for bounds in ((0, 1, 4), (0, 3, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)):
        partition = Partition(pp=len(bounds) - 1)
        stages = model.stages(partition, bounds)
        assert relative_error(model.result(stages, 1), model.wanted) < 1e-5
        assert sum(op_counts(*stages)[n] for n in ("paged_attention",)) == 4


def test_a_stage_has_what_it_needs_and_no_more(traced: Any):
    model = _model(traced, "llama")
    first, middle, last = model.stages(Partition(pp=3), (0, 1, 3, 4))
    batch = {"position_ids", "block_table", "query_start", "context_lens", "kv_0"}
    assert _inputs(first) == batch | {"token_ids"}
    assert _inputs(middle) == batch | {"hidden_0"}
    assert _inputs(last) == batch | {"hidden_1", "logit_rows"}
    outputs = [graph.output_node().meta["outputs"] for graph in (first, middle, last)]
    assert outputs == [("hidden_0",), ("hidden_1",), ()]
    (hidden,) = [n for n in middle.nodes if n.meta.get("input") == "hidden_0"]
    assert hidden.meta["dims"] == (1, "tokens", 64)
    names = [{spec.name for spec in weights_of_rank(g, 0)} for g in (first, middle, last)]
    assert "model.embed_tokens.weight" in names[0] - names[1] - names[2]
    assert "lm_head.weight" in names[2] and "lm_head.weight" not in names[0] | names[1]
    assert all("model.rotary_emb.inv_freq" in some for some in names)  # computed in each


def test_each_stage_has_a_pool_for_its_own_layers(traced: Any):
    model = _model(traced, "llama")
    stages = model.stages(Partition(pp=2), (0, 1, 4))
    groups = [kv_groups(graph, 16) for graph in stages]
    assert [group.layers for (group,) in groups] == [(0,), (1, 2, 3)]
    places = [[arguments(n)["layer"] for n in calls(g, "paged_attention")] for g in stages]
    assert places == [[0], [0, 1, 2]]


def test_tied_tables_are_in_both_ends(traced: Any):
    model = _model(traced, "gemma", 2)
    for tp in (1, 2):
        stages = model.stages(Partition(tp=tp, pp=2))
        names = [{spec.name for spec in weights_of_rank(g, tp - 1)} for g in stages]
        assert all("model.embed_tokens.weight" in some for some in names)
        assert relative_error(model.result(stages, tp), model.wanted) < 1e-5


def test_what_later_stages_need_passes_through(traced: Any):
    """The first layer's input, added to the last layer's output."""
    module = traced(FAMILIES["llama"] | {"num_hidden_layers": 3}, "float32")
    (table,) = [n for n in module.graph.nodes if "embedding" in str(n.target)]
    (first, *_, last) = [n for n in module.graph.nodes if "aten.add.Tensor" in str(n.target)]
    with module.graph.inserting_before(last):
        new = module.graph.call_function(first.target, (last.args[0], table))
    new.meta = dict(last.meta)
    last.replace_input_with(last.args[0], new)
    model = Model(module)
    stages = model.stages(Partition(pp=3), (0, 1, 2, 3))
    names = [graph.output_node().meta["outputs"] for graph in stages]
    assert names == [("hidden_0", "hidden_2"), ("hidden_1", "hidden_2"), ()]
    assert relative_error(model.result(stages, 1), model.wanted) < 1e-5
    both = model.stages(Partition(tp=2, pp=3), (0, 1, 2, 3))
    assert relative_error(model.result(both, 2), model.wanted) < 1e-5


def test_bounds_that_do_not_cover_are_refused(traced: Any):
    model = _model(traced, "llama")
    with pytest.raises(PartitionError, match="do not cover 4 layers"):
        model.stages(Partition(pp=2), (0, 2, 3))


def test_a_cut_graph_stays_as_it_is(traced: Any):
    graph = _model(traced, "llama").copy()
    cut = CutStage((0, 2, 4), 1)
    cut.run(graph, CONTEXT)
    once = print_graph(graph)
    cut.run(graph, CONTEXT)
    assert print_graph(graph) == once
