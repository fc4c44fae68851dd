"""Whole CUDA plans executed in Triton's interpreter: each family's logits against transformers'.

A ragged prefill, a step that mixes a chunk with decoding, then decode steps with an idle row, all
through one arena whose unused places hold NaN. Kernels are those of sm_80: no dependent launch.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.interpreter import Interpreter
from sitsc.core.errors import UnsupportedModelError
from sitsc.core.hardware import load_target
from sitsc.core.interpret import RandomTensors, relative_error, tensor_shapes
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Numerics, Plan, Tokens
from sitsc.core.tiles import TileEntry, TileTable
from sitsc.core.weights import materialise
from sitsc.frontend.checkpoint_names import renamed
from sitsc.passes import CUDA, CUDA_WIDE
from sitsc.passes.base import Pass, PassContext
from sitsc.passes.cuda_planner import make_cuda_plan
from sitsc.passes.fxutil import aten, call, calls
from sitsc.passes.fxutil import replace as replace_value
from sitsc.passes.planner import ModelFacts, weights_of
from sitsc.passes.runner import tidy
from tests.cuda_families import CUDA_FAMILIES, VOCABULARY
from tests.cuda_plan_interpreter import PlanStep, run_plan

PAGE, CONTEXT, BATCH = 16, 64, 4
PROMPTS = (17, 2, 4)
TOKENS = [[(7 * i * i + 3 * i + 11 * s + 1) % VOCABULARY for i in range(30)] for s in range(3)]
FEW = 4  # multiprocessors: fewer programs to interpret
LEAST = 1e-2


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as started:
        yield started


def make_plan(
    graph: fx.Graph, passes: tuple[Pass, ...] = CUDA, table: TileTable | None = None
) -> tuple[Plan, CudaProvider]:
    """The plan of a traced graph; decode buckets 1, 2, 4, prefill 64 and, by the library, 68."""
    context = PassContext("bfloat16", "none", "bfloat16", PAGE, "a100")
    for each in passes:
        each.run(graph, context)
        tidy(graph)
    data = load_target("a100")
    assert data.cuda is not None
    provider = CudaProvider("a100", replace(data.cuda, num_sms=FEW))
    provider.table = table or provider.table
    options = CompileOptions(
        target="a100",
        max_batch=BATCH,
        max_context=CONTEXT,
        prefill_chunk_tokens=CONTEXT,
        kv_tokens=4 * CONTEXT,
        page_tokens=PAGE,
    )
    tokens = Tokens(VOCABULARY, VOCABULARY, 0, False, (2,), CONTEXT)
    numerics = Numerics("bfloat16", "none", "bfloat16", "float32", True, "any step", ())
    facts = ModelFacts("tiny", "tiny", {}, tokens)
    return make_cuda_plan(graph, facts, options, numerics, data, provider)[0], provider


def reference(
    config: dict[str, Any], weights: RandomTensors, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Logits of every token of every sequence by transformers, with weights of bfloat16."""
    import transformers  # noqa: PLC0415  (seconds)

    values = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    parsed = transformers.AutoConfig.for_model(config["model_type"], **values)
    model = transformers.AutoModelForCausalLM.from_config(
        parsed, attn_implementation="eager", dtype=dtype
    ).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            stored = name if name in weights.shapes else renamed(name, config["model_type"])
            if stored in weights.shapes:
                tensor.copy_(weights.read(stored, 0, tensor.shape[0]).bfloat16())
        return [model(torch.tensor([ids]), use_cache=False).logits[0].float() for ids in TOKENS]


class Script:
    """Steps over the sequences, and the (sequence, position) of each row of their logits."""

    def __init__(self, plan: Plan) -> None:
        self.regimes = {k: [r for r in plan.regimes if r.kind == k] for k in ("decode", "prefill")}
        width = next(b for b in plan.memory.arena if b.name == "block_table").shape[1]
        pages = list(range(plan.memory.kv_pages))[::-1]
        self.tables = [pages[s * width : (s + 1) * width] for s in range(len(PROMPTS))]
        self.done = [0] * len(PROMPTS)
        self.steps: list[PlanStep] = []
        self.rows: list[list[tuple[int, int]]] = []

    def ragged(self, regime: str, counts: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """A step with `counts` new tokens of each sequence, logits of the `wanted` ones."""
        spans = [range(at, at + n) for at, n in zip(self.done, counts, strict=True)]
        starts = [sum(counts[:s]) for s in range(len(counts) + 1)]
        self.steps.append(
            PlanStep(
                regime,
                [TOKENS[s][at] for s, span in enumerate(spans) for at in span],
                [at for span in spans for at in span],
                starts,
                list(self.done),
                self.tables,
                [starts[s + 1] - 1 for s in wanted],
            )
        )
        self.done = [span.stop for span in spans]
        self.rows.append([(s, self.done[s] - 1) for s in wanted])

    def decode(self, regime: str, sequences: tuple[int, ...]) -> None:
        """A decode step; rows of the bucket past the sequences are idle."""
        idle = int(regime.rpartition("_")[2]) - len(sequences)
        at = [self.done[s] for s in sequences]
        tokens = [TOKENS[s][self.done[s]] for s in sequences] + [0] * idle
        tables = [self.tables[s] for s in sequences] + [[0]] * idle
        self.steps.append(
            PlanStep(regime, tokens, at + [0] * idle, [], at + [-1] * idle, tables, [])
        )
        self.rows.append([(s, self.done[s]) for s in sequences])
        for s in sequences:
            self.done[s] += 1


def script(plan: Plan, buckets: tuple[str, ...]) -> Script:
    """Prefill by the library, a mixed step by our kernels, then decode steps."""
    made = Script(plan)
    small, large = (r.name for r in made.regimes["prefill"][-2:])
    made.ragged(large, PROMPTS, (0, 1, 2))
    made.ragged(small, (4, 1, 1), (0, 2))
    for bucket in buckets:
        made.decode(bucket, (0, 1, 2)[: int(bucket.rpartition("_")[2])])
    return made


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
    wanted, rounded = reference(config, random), reference(config, random, torch.bfloat16)
    allowed = max(LEAST, 1.5 * relative_error(torch.cat(rounded), torch.cat(wanted)))
    for step, logits, rows in zip(steps.steps, found, steps.rows, strict=True):
        expected = torch.stack([wanted[s][at] for s, at in rows])
        error = relative_error(logits[: len(rows)], expected)
        assert error < allowed, f"{step.regime}: relative error {error:.1e} of {allowed:.1e}"


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


def launched(plan: Plan, regime: str) -> list[list[str]]:
    """For each group of a regime, templates; those that leave or add parts are marked."""
    found = next(r for r in plan.regimes if r.name == regime)
    return [
        [
            launch.template + "+" * any(a.name == "parts_ptr" for a in launch.arguments)
            for launch in group.launches
        ]
        for group in found.groups
        if group.name not in ("place", "sample")
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
