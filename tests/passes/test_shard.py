"""Sharding of every family: ranks together compute what one does, with as few operators."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_families import FAMILIES
from sharding import COLLECTIVES, CONTEXT, LOOKUP, Model, op_counts

from sitsc.core.errors import PartitionError
from sitsc.core.interpret import relative_error
from sitsc.core.parallel import Partition, check_partition
from sitsc.core.printer import print_graph
from sitsc.passes import CPU, CPU_INT8, CUDA, CUDA_WIDE, FUSED
from sitsc.passes.base import PassContext
from sitsc.passes.for_rank import stage_graphs
from sitsc.passes.fxutil import calls, tensor
from sitsc.passes.shard import Shard, gathers, held_whole
from sitsc.passes.shard_facts import divisible

TOLERANCE = 1e-5
# Routers, down-projections of latent attention, tables of positions.
WHOLE = ("gate", "shared_expert_gate", "q_a_proj", "kv_a_proj_with_mqa", "wpe")
WHOLE += ("q_a_proj+kv_a_proj_with_mqa", "router", "gate+shared_expert_gate")
EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3")
PARTITIONS = (Partition(tp=2), Partition(pp=2), Partition(tp=2, pp=2))
# More ranks than KV heads: of each form of heads one.
REPEATED = ("llama", "gemma2", "phi3", "gpt_neox", "olmo2", "cohere", "deepseek_v3", "gpt_oss")
OF_EXPERTS = (Partition(tp=2, ep=2), Partition(tp=4, ep=2), Partition(tp=4, ep=4, pp=2))


def _partitions(family: str) -> tuple[Partition, ...]:
    more = (Partition(tp=4),) if family in REPEATED else ()
    return PARTITIONS + more + (OF_EXPERTS if family in EXPERTS else ())


# Families that are cut like one of the others: tables of rotation and windows are not cut.
_SLOW = ("llama3_scaled", "llama_linear", "qwen3_yarn", "phi3_longrope", "qwen2_windows")
_SLOW += ("mistral", "qwen2", "cohere_plain", "gpt_neox_serial")
_EVERY = [pytest.param(f, marks=[pytest.mark.slow] * (f in _SLOW)) for f in FAMILIES]


@pytest.mark.parametrize("family", _EVERY)
def test_ranks_compute_what_one_does(family: str, traced: Any):
    model = Model(traced(FAMILIES[family], "float32"))
    for partition in _partitions(family):
        check_partition(partition, divisible(model.whole))
        stages = model.stages(partition)
        error = relative_error(model.result(stages, partition.tp), model.wanted)
        assert error < TOLERANCE, (partition.text(), error)
        assert not any(map(gathers, stages)), partition.text()
        assert all(name.split(".")[-2] in WHOLE for g in stages for name in held_whole(g))
        if partition.pp == 1 and partition.ep == 1:
            _has_few_collectives(stages[0], family)
            _has_no_more_operators(model, stages[0], family, partition.tp)


def _has_no_more_operators(model: Model, graph: Any, family: str, tp: int) -> None:
    """Besides collectives and the lookup of a part of the table; OLMo-2's norm is written out."""
    more = op_counts(graph)
    for name in COLLECTIVES:
        del more[name]
    more.subtract(LOOKUP)
    more.subtract(op_counts(model.whole))
    if family == "olmo2":
        more -= +more
    elif tp == 4 and "glu" in more:  # 24 rows of a gate are no whole blocks
        more -= +more
    assert not +more, +more


def _has_few_collectives(graph: Any, family: str) -> None:
    """Two sums a layer, one in parallel blocks; one for the table and one gather of the logits."""
    counts, layer = op_counts(graph), 2
    if family in ("cohere", "cohere_plain", "gpt_neox"):
        layer = 1
    elif family == "olmo2":  # and the squares of q and of k
        layer = 4
    assert (counts["all_reduce"], counts["all_gather"]) == (2 * layer + 1, 1)


@pytest.mark.parametrize("family", ["llama_biased", "gpt2", "deepseek_v3"])
def test_passes_of_gpus_after_sharding(family: str, traced: Any):
    """Without the passes that only the CPU has; also where a weight lies [columns, rows]."""
    model = Model(traced(FAMILIES[family], "float32"), FUSED)
    for partition in (Partition(tp=2), Partition(tp=4, pp=2)):
        stages = model.stages(partition)
        assert relative_error(model.result(stages, partition.tp), model.wanted) < TOLERANCE
        assert not any(map(gathers, stages))


def test_experts_behind_a_router_that_no_matcher_knows(traced: Any):
    model = Model(
        traced(FAMILIES["gpt_oss"], "float32"), tuple(p for p in CPU if p.name != "match_router")
    )
    assert op_counts(model.whole)["experts"] == 2
    for partition in (Partition(tp=2), Partition(tp=2, ep=2), Partition(tp=4, ep=2)):
        stages = model.stages(partition)
        assert relative_error(model.result(stages, partition.tp), model.wanted) < TOLERANCE


def test_a_wide_residual_stream_in_bfloat16(traced: Any):
    """It goes through sums of ranks and from stage to stage as float32."""
    context = PassContext("bfloat16", "none", "bfloat16", 16, "h200")
    exact = Model(traced(FAMILIES["llama"], "float32"), CUDA).wanted
    model = Model(traced(FAMILIES["llama"], "bfloat16"), CUDA_WIDE, context=context)
    whole = relative_error(model.wanted, exact)
    for partition in (Partition(tp=2), Partition(tp=2, pp=2)):
        stages = model.stages(partition)
        assert relative_error(model.result(stages, 2), exact) < 2 * whole
        sums = [node for graph in stages for node in calls(graph, "all_reduce")]
        assert len(sums) == 5 and all(tensor(n).dtype == torch.float32 for n in sums)
        parts = [tensor(n.args[0]).dtype for n in sums[1:]]
        assert parts == [torch.bfloat16] * 4  # what travels


def test_every_pass_after_sharding_keeps_what_the_ranks_compute(traced: Any):
    model = Model(traced(FAMILIES["qwen2_moe"], "float32"))
    partition = Partition(tp=4, ep=2)
    for most in range(1, 1 + len(model.rest)):
        stages = model.stages(partition, most=most)
        assert relative_error(model.result(stages, 4), model.wanted) < TOLERANCE, most


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_int8_weights_are_scaled_by_rank(family: str, traced: Any):
    """Rows are quantised by what a rank has of them: as near to the exact result as whole rows.

    Also where the vocabulary is padded, and where the file holds a weight turned.
    """
    config = FAMILIES[family] | {"vocab_size": 323}
    exact = Model(traced(config, "float32"))
    model = Model(traced(config, "float32"), CPU_INT8)
    whole = relative_error(model.wanted, exact.wanted)
    cut = relative_error(model.result(model.stages(Partition(tp=2)), 2), exact.wanted)
    assert 1e-4 < cut < 1.5 * whole


def test_an_operator_without_a_rule_reads_whole_values(traced: Any):
    """The result is right, and it is told where it costs."""
    module = traced(FAMILIES["llama"], "float32")
    for name, target in (("attention", torch.ops.aten.cumsum), ("silu", torch.ops.aten.cumsum)):
        node = calls(module.graph, name)[0]
        with module.graph.inserting_after(node):
            new = module.graph.call_function(target.default, (node, -1))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new, delete_user_cb=lambda user, new=new: user is not new)
    model = Model(module)
    (stage,) = model.stages(Partition(tp=2))
    assert relative_error(model.result([stage], 2), model.wanted) < TOLERANCE
    assert gathers(stage) == ("model.layers.0.self_attn: aten.cumsum",)
    parts = ("self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj")
    assert sorted(held_whole(stage)) == sorted(f"model.layers.0.{p}.weight" for p in parts)


def test_the_graphs_of_all_stages(traced: Any, tmp_path: Path):
    """As a compile makes them: verified after every pass, with texts on demand."""
    model = Model(traced(FAMILIES["mixtral"], "float32"))
    module, partition = traced(FAMILIES["mixtral"], "float32"), Partition(tp=2, pp=2, ep=2)
    found = stage_graphs(module, CPU, partition, (0, 1, 2), CONTEXT, tmp_path)
    stages = [part.graph for part in found]
    assert relative_error(model.result(stages, 2), model.wanted) < TOLERANCE
    assert "all_reduce" in next(tmp_path.glob("stage_1/*_shard.txt")).read_text()
    with pytest.raises(PartitionError, match="EP 2 must divide TP 1"):
        stage_graphs(traced(FAMILIES["mixtral"], "float32"), CPU, Partition(ep=2), (0, 2), CONTEXT)


def test_a_sharded_graph_stays_as_it_is(traced: Any):
    model = Model(traced(FAMILIES["gpt_oss"], "float32"))
    (stage,) = model.stages(Partition(tp=2), most=0)
    once = print_graph(stage)
    Shard(Partition(tp=2)).run(stage, CONTEXT)
    assert print_graph(stage) == once
