"""Whole CUDA plans executed in Triton's interpreter: each family's logits against transformers'.

A ragged prefill, a step that mixes a chunk with decoding, then decode steps with an idle row, all
through one arena whose unused places hold NaN. Kernels are those of sm_80: no dependent launch.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import fx

from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.interpreter import Interpreter
from sitsc.core.errors import UnsupportedModelError
from sitsc.core.interpret import RandomTensors, tensor_shapes
from sitsc.core.plan import STEP_GROUPS, Plan
from sitsc.core.tiles import TileEntry, TileTable
from sitsc.core.weights import materialise
from sitsc.passes import CUDA, CUDA_WIDE
from sitsc.passes.base import Pass
from sitsc.passes.fxutil import aten, call, calls
from sitsc.passes.fxutil import replace as replace_value
from sitsc.passes.planner import weights_of
from sitsc.passes.runner import tidy
from tests.cuda_families import CUDA_FAMILIES, VOCABULARY
from tests.cuda_plan_interpreter import run_plan
from tests.cuda_plan_steps import PASS_CONTEXT, assert_logits, plan_of, provider_of, script


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as started:
        yield started


def make_plan(
    graph: fx.Graph, passes: tuple[Pass, ...] = CUDA, table: TileTable | None = None
) -> tuple[Plan, CudaProvider]:
    """The plan of a traced graph."""
    for each in passes:
        each.run(graph, PASS_CONTEXT)
        tidy(graph)
    provider, data = provider_of()
    provider.table = table or provider.table
    return plan_of(graph, provider, data), provider


def assert_close(
    interpreter: Interpreter,
    config: dict[str, Any],
    graph: fx.Graph,
    random: RandomTensors,
    plan: Plan,
    provider: CudaProvider,
    buckets: tuple[str, ...],
) -> None:
    """A plan's logits are about as close to float32 as those of transformers in bfloat16."""
    weights = {spec.name: materialise(spec, random.read) for spec in weights_of(graph)}
    steps = script(plan, buckets)
    found = interpreter.call(run_plan, plan, provider.sources, weights, steps.steps)
    assert_logits(config, random, steps, found)


@pytest.mark.parametrize("family", CUDA_FAMILIES)
def test_a_plan_is_as_close_as_transformers_in_bfloat16(
    family: str, traced: Any, interpreter: Interpreter
):
    config = CUDA_FAMILIES[family]
    graph = traced(config, "bfloat16").graph
    random = RandomTensors(tensor_shapes(graph))
    plan, provider = make_plan(graph)
    small = family == "mistral_window"
    buckets = ("decode_4", "decode_4", *(("decode_2", "decode_1") if small else ()))
    assert_close(interpreter, config, graph, random, plan, provider, buckets)


def test_a_wide_residual_stream_is_float32_in_every_sum(traced: Any, interpreter: Interpreter):
    config = CUDA_FAMILIES["llama"]
    graph = traced(config, "bfloat16").graph
    random = RandomTensors(tensor_shapes(graph))
    plan, provider = make_plan(graph, CUDA_WIDE)
    sums = {
        a.dtype
        for regime in plan.regimes
        for group in regime.groups
        for launch in group.launches
        for a in launch.arguments
        if a.name == "residual_ptr" or (launch.kernel == "addmm" and a.name == "y")
    }
    assert sums == {"float32"}
    assert_close(interpreter, config, graph, random, plan, provider, ("decode_4", "decode_4"))


_APART = {"block_t": 64, "block_n": 16, "block_k": 16, "stages": 2, "num_warps": 4, "early": 0}
# rows, columns, norm, epilogue, dtype, split and whether the sums may stay in parts
_IN_PARTS = (
    (128, 48, True, "store", "bf16", 2, 1),
    (48, 64, False, "residual", "bf16", 4, 1),
    (80, 48, True, "glu", "bf16", 2, 0),
    (48, 80, False, "residual", "bf16", 2, 1),
    (VOCABULARY, 48, True, "store", "fp32", 1, 0),
)


def parts_table(*, head_apart: bool = True) -> TileTable:
    """Tiles for llama's layers that leave sums in parts; the last norm has a kernel or not."""
    entries = []
    for rows, columns, norm, epilogue, dtype, split, parts in _IN_PARTS:
        tile = _APART | {"split": split, "parts": parts}
        if norm and (head_apart or dtype == "bf16"):
            tile |= {"separate_norm": 1}
        shape = (rows, columns, norm, epilogue, dtype)
        entries.append(TileEntry(*shape, 1, 64, "skinny", tile, {}))
    return TileTable(tuple(entries))


def scaled_table(kernel: str) -> TileTable:
    """Tiles of one kernel for llama's layers that scale residual sums for the next norm."""
    entries = []
    for rows, columns, norm, epilogue, dtype, *_ in _IN_PARTS:
        skinny = _APART | {"fold": 1 if norm else 2, "block_n": 16, "block_k": 8 if norm else 16}
        skinny |= {"block_k": 16, "fold": 2} if columns == 64 else {"fold": 1}
        gemv = {"block_n": 4, "block_k": 128, "programs": 5, "stages": 3 if norm else 0}
        tile = skinny if kernel == "skinny" else gemv
        tile |= {"scaled": 1} if epilogue == "residual" else {}
        tile |= {"separate_norm": 2} if norm and kernel == "skinny" else {}
        high = 64 if kernel == "skinny" else 4
        entries.append(TileEntry(rows, columns, norm, epilogue, dtype, 1, high, kernel, tile, {}))
    return TileTable(tuple(entries))


def launched(plan: Plan, regime: str) -> list[list[str]]:
    """For each group of a regime, templates; those that leave or add parts are marked."""
    found = next(r for r in plan.regimes if r.name == regime)
    return [
        [
            launch.template + "+" * any(a.name == "parts_ptr" for a in launch.arguments)
            for launch in group.launches
        ]
        for group in found.groups
        if group.name not in STEP_GROUPS
    ]


@pytest.mark.parametrize(("passes", "head_apart"), [(CUDA, False), (CUDA_WIDE, True)])
def test_sums_in_parts_are_added_by_their_readers(
    passes: tuple[Pass, ...], head_apart: bool, traced: Any, interpreter: Interpreter
):
    config = CUDA_FAMILIES["llama"] | {"num_hidden_layers": 4}
    graph = traced(config, "bfloat16").graph
    random = RandomTensors(tensor_shapes(graph))
    plan, provider = make_plan(graph, passes, parts_table(head_apart=head_apart))
    layer = ["rms_norm+", "skinny+", "attention_decode", "skinny+", "rms_norm+", "skinny", "skinny"]
    repeated = [*layer[:-1], "skinny+"]
    last = [*layer[:-1], "skinny+" if head_apart else "skinny"]
    before, after = ["gather+", "rope_table"], ["rms_norm+", "skinny"] if head_apart else ["skinny"]
    assert launched(plan, "decode_4") == [before, repeated, last, after]
    assert len(plan.regimes[0].groups[2].layers) == 3
    assert_close(interpreter, config, graph, random, plan, provider, ("decode_4", "decode_2"))


@pytest.mark.parametrize(("kernel", "passes"), [("skinny", CUDA_WIDE), ("gemv", CUDA)])
def test_sums_are_scaled_for_the_norms_that_read_them(
    kernel: str, passes: tuple[Pass, ...], traced: Any, interpreter: Interpreter
):
    """No norm has a launch; the last sum of a layer is scaled for the next layer."""
    config = CUDA_FAMILIES["llama"] | {"num_hidden_layers": 4}
    graph = traced(config, "bfloat16").graph
    random = RandomTensors(tensor_shapes(graph))
    plan, provider = make_plan(graph, passes, scaled_table(kernel))
    name = "gemv_stream" if kernel == "gemv" else kernel
    plain = "gemv" if kernel == "gemv" else kernel
    layer = [name, "attention_decode", plain, name, plain]
    assert launched(plan, "decode_4") == [
        ["gather", "rope_table"],
        layer,
        layer,
        [name],
    ]
    groups = next(r for r in plan.regimes if r.name == "decode_4").groups
    norms = [
        a.buffer
        for group in groups
        for launch in group.launches
        for a in launch.arguments
        if a.name == "next_norm_ptr"
    ]
    within, after = "{layer}.post_attention_layernorm", "{layer+1}.input_layernorm"
    layers = [f"model.layers.{norm}.weight" for norm in (within, after, within)]
    assert norms == [*layers, "model.norm.weight"]
    assert_close(interpreter, config, graph, random, plan, provider, ("decode_4", "decode_2"))


def test_a_kernel_that_cannot_add_parts_gets_the_sum(traced: Any):
    """Heads that are normed before attention, and a first layer unlike those after it."""
    config = CUDA_FAMILIES["qwen3"]
    graph = traced(config, "bfloat16").graph
    plan, _ = make_plan(graph, CUDA, parts_table())
    groups = launched(plan, "decode_4")
    assert groups[1][1] == "skinny"
    assert groups[1].count("rms_norm+") == 2


def test_an_operator_without_a_kernel_is_refused_by_name(traced: Any):
    graph = traced(CUDA_FAMILIES["llama"], "bfloat16").graph
    node = calls(graph, "linear")[-2]
    with graph.inserting_after(node):
        new = call(graph, aten.cumsum.default, (node, -1), node)
    replace_value(node, new)
    new.args = (node, -1)
    where = r"aten\.cumsum has no CUDA kernel \[model\.layers\.2\.mlp\.down_proj\]"
    with pytest.raises(UnsupportedModelError, match=where):
        make_plan(graph)
