import copy
from typing import Any

import pytest
from compiled_families import FAMILIES as COMPILED
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from sitsc.core.parallel import Partition
from sitsc.core.printer import symbol_names
from sitsc.models.presets import preset
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.cost import Sizes, cost_of
from sitsc.passes.for_rank import stage_passes
from sitsc.passes.fxutil import calls
from sitsc.passes.model_record import ATTENTION, EXPERTS, LINEAR, ModelRecord
from sitsc.passes.op_time import Cut, weight_share
from sitsc.passes.partition import divisible_of
from sitsc.passes.planner import weights_of
from sitsc.passes.record_maker import record_of
from sitsc.passes.runner import tidy
from sitsc.passes.shard_facts import divisible
from sitsc.passes.step_time import StepModel
from tests.partition_records import final_graph, record, search
from tests.passes.families import FAMILIES

FAMILY_NAMES = ("odd_sizes",)
PRESET_NAMES = ("tiny-gpt-oss",)


def _configs() -> dict:
    found = {name: FAMILIES[name] for name in FAMILY_NAMES}
    return found | {name: preset(name) for name in PRESET_NAMES}


@pytest.fixture(scope="module")
def graphs() -> dict:
    return {name: final_graph(config, "h200") for name, config in _configs().items()}


def _record(graph) -> ModelRecord:
    return record_of(graph, "model", 1000, 128)


@pytest.mark.parametrize("name", [*FAMILY_NAMES, *PRESET_NAMES])
def test_costs_are_those_of_the_graph(graphs, name):
    """Any size of a step: the record says of kernels what cost_of says of their nodes."""
    graph = graphs[name]
    made = _record(graph)
    ops = [op for i in made.layers for op in made.classes[i]]
    symbols = symbol_names(graph)

    @given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 200))
    @settings(max_examples=15)
    def check(sequences: int, each: int, context: int) -> None:
        tokens = sequences * each
        values = {"tokens": tokens, "rows": sequences, "sequences": sequences}
        sizes = Sizes(symbols, values | {"sequences+1": sequences + 1, "context": context})
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        for kind, operator in (
            (LINEAR, "fused_linear"),
            (ATTENTION, "attention"),
            (EXPERTS, "moe"),
        ):
            calls = [n for n in nodes if operator in str(n.target)]
            known = [op for op in (*made.before, *ops, *made.after) if op.kind == kind]
            assert len(calls) == len(known)
            for node, op in zip(calls, known, strict=True):
                mine, theirs = op.cost(tokens, sequences, sequences, context), cost_of(node, sizes)
                assert mine.flops == pytest.approx(theirs.flops, rel=1e-9, abs=1)
                assert mine.bytes == pytest.approx(theirs.bytes, rel=1e-3, abs=64), op.name

    check()


@pytest.mark.parametrize("name", [*FAMILY_NAMES, *PRESET_NAMES])
def test_roles(graphs, name):
    """Attention is fed by columns and followed by rows; logits are cut by the vocabulary."""
    made = _record(graphs[name])
    for ops in made.classes:
        linears = [op for op in ops if op.kind == LINEAR]
        assert [op.role for op in linears[:2]] == ["column", "row"]
        routers = [op for op in linears if "gate" in op.name.split(".") or "router" in op.name]
        assert all(op.role == "whole" for op in routers)
        if not routers:
            assert [op.role for op in linears[2:]] == ["column", "row"]
        assert all(op.role == "experts" for op in ops if op.kind == EXPERTS)
    assert [op.role for op in made.after if op.kind == LINEAR] == ["vocabulary"]


@pytest.mark.parametrize("name", [*FAMILY_NAMES, *PRESET_NAMES])
def test_weights_and_what_divides(graphs, name):
    graph, made = graphs[name], _record(graphs[name])
    stored = sum(spec.nbytes for spec in weights_of(graph))
    model = StepModel(
        made, search("tiny-qwen2", 1).machine.device, search("tiny-qwen2", 1).machine.where
    )
    counted = model.weight_bytes(0, made.num_layers, Cut())
    assert counted == pytest.approx(stored, rel=0.02, abs=4096)
    assert divisible_of(made).heads == divisible(graph).heads
    assert [n for n, _ in divisible_of(made).experts] == [n for n, _ in divisible(graph).experts]
    assert set(divisible(graph).intermediate) <= set(divisible_of(made).intermediate)
    if not made.experts():
        assert divisible_of(made).intermediate


_OTHER_MLPS = ("gpt2", "gpt_neox", "starcoder2", "cohere")


@pytest.mark.parametrize(
    ("family", "target"),
    [("deepseek_v3", "cpu"), *((f, target) for f in _OTHER_MLPS for target in ("cpu", "h200"))],
)
def test_what_divides_is_that_of_the_compiler(family: str, target: str, traced: Any):
    """Also MLPs without a gate, and those beside attention: sizes that only some degrees divide."""
    config = COMPILED[family] | {"intermediate_size": 90, "moe_intermediate_size": 42}
    config |= {"n_inner": 90} if family == "gpt2" else {}
    names = [item.name for item in CPU]
    graph = apply(traced(config, "float32").graph, CPU[: names.index("page_attention")])
    found = divisible(graph)
    assert found.intermediate == ((42, 90) if family == "deepseek_v3" else (90,))
    assert divisible_of(_record(final_graph(config, target))) == found


def test_sums_of_a_llama():
    """Two sums a layer, one for the table; weights of eight ranks are those of one."""
    made = record("llama3-8b")
    assert [op.role for op in made.classes[0] if op.reduced_bytes] == ["row", "row"]
    assert made.before[0].reduced_bytes == 4096 * 2
    for op in made.classes[0]:
        if op.kind == LINEAR:
            assert weight_share(op, Cut(8)) == pytest.approx(1 / 8)
        if op.feeds:  # 16 ranks of 8 KV heads hold each twice
            assert weight_share(op, Cut(16)) == pytest.approx((2 + 2) / 48)


def apply(graph: fx.Graph, passes: tuple) -> fx.Graph:
    for item in passes:
        item.run(graph, PassContext("float32", "none", "float32", 16, "cpu"))
        tidy(graph)
    return graph


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "olmo2", "qwen2_moe"])
def test_sums_are_those_of_the_sharded_graph(family, traced):
    """As many all-reduces as the sharding passes put into the graph of one of two ranks."""
    module = traced(COMPILED[family], "float32")
    names = [item.name for item in CPU]
    cut, rest = CPU[: names.index("page_attention")], CPU[names.index("page_attention") :]
    graph = apply(module.graph, cut)
    whole, ours = (fx.GraphModule(nn.Module(), copy.deepcopy(graph)).graph for _ in range(2))
    made = record_of(apply(whole, rest), family, COMPILED[family]["vocab_size"], 128)
    passes = stage_passes(rest, Partition(tp=2), 0, (0, made.num_layers))
    sums = calls(apply(ours, passes), "all_reduce")
    ops = [*made.before, *(op for i in made.layers for op in made.classes[i]), *made.after]
    assert sum(op.reduced_bytes > 0 for op in ops) == len(sums)
