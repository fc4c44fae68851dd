"""Steps through CUDA plans of tiny families, and what transformers says they give.

A ragged prefill, a step that mixes a chunk with decoding, then decode steps with an idle row.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from sitsc.codegen.cuda import CudaProvider
from sitsc.core.hardware import TargetData, load_target
from sitsc.core.interpret import RandomTensors, relative_error
from sitsc.core.options import CompileOptions
from sitsc.core.parallel import Partition
from sitsc.core.plan import Numerics, Plan, Tokens
from sitsc.frontend.checkpoint_names import renamed
from sitsc.passes.base import PassContext
from sitsc.passes.cuda_planner import make_cuda_plan
from sitsc.passes.planner import ModelFacts
from tests.cuda_families import VOCABULARY
from tests.cuda_plan_interpreter import PlanStep

PAGE, CONTEXT, BATCH = 16, 64, 4
PROMPTS = (17, 2, 4)
TOKENS = [[(7 * i * i + 3 * i + 11 * s + 1) % VOCABULARY for i in range(30)] for s in range(3)]
FEW = 4  # multiprocessors: fewer programs to interpret
LEAST = 1e-2
ONE = Partition()
PASS_CONTEXT = PassContext("bfloat16", "none", "bfloat16", PAGE, "a100")


def provider_of(kind: type[CudaProvider] = CudaProvider) -> tuple[CudaProvider, TargetData]:
    """A provider for a GPU of few multiprocessors, without dependent launch, and its target."""
    data = load_target("a100")
    assert data.cuda is not None
    return kind("a100", replace(data.cuda, num_sms=FEW)), data


def plan_of(
    graph: fx.Graph,
    provider: CudaProvider,
    data: TargetData,
    partition: Partition = ONE,
    vocabulary: int = VOCABULARY,
) -> Plan:
    """The plan of a final graph; decode buckets 1, 2, 4, prefill 64 and, by the library, 68."""
    options = CompileOptions(
        target="a100",
        max_batch=BATCH,
        max_context=CONTEXT,
        prefill_chunk_tokens=CONTEXT,
        kv_tokens=4 * CONTEXT,
        page_tokens=PAGE,
        tp=partition.tp,
        pp=partition.pp,
        ep=partition.ep,
    )
    tokens = Tokens(vocabulary, vocabulary, 0, False, (2,), CONTEXT)
    numerics = Numerics("bfloat16", "none", "bfloat16", "float32", True, "any step", ())
    facts = ModelFacts("tiny", "tiny", {}, tokens)
    return make_cuda_plan(graph, facts, options, numerics, data, provider)[0]


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

    def __init__(self, plan: Plan, prompts: tuple[int, ...] = PROMPTS) -> None:
        self.prompts = prompts
        self.regimes = {k: [r for r in plan.regimes if r.kind == k] for k in ("decode", "prefill")}
        width = next(b for b in plan.memory.arena if b.name == "block_table").shape[1]
        pages = list(range(plan.memory.kv_pages))[::-1]
        self.tables = [pages[s * width : (s + 1) * width] for s in range(len(self.prompts))]
        self.done = [0] * len(self.prompts)
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


def script(plan: Plan, buckets: tuple[str, ...], prompts: tuple[int, ...] = PROMPTS) -> Script:
    """Prefill by the library, a mixed step by our kernels, then decode steps."""
    made = Script(plan, prompts)
    small, large = (r.name for r in made.regimes["prefill"][-2:])
    made.ragged(large, prompts, (0, 1, 2))
    made.ragged(small, (4, 1, 1), (0, 2))
    for bucket in buckets:
        made.decode(bucket, (0, 1, 2)[: int(bucket.rpartition("_")[2])])
    return made


def assert_logits(
    config: dict[str, Any], random: RandomTensors, steps: Script, found: list[Tensor]
) -> None:
    """Logits are about as close to float32 as those of transformers in bfloat16."""
    wanted, rounded = reference(config, random), reference(config, random, torch.bfloat16)
    allowed = max(LEAST, 1.5 * relative_error(torch.cat(rounded), torch.cat(wanted)))
    assert_near(steps, found, wanted, allowed)


def assert_near(steps: Script, found: list[Tensor], wanted: list[Tensor], allowed: float) -> None:
    """Logits of every step against those of every token of every sequence."""
    for step, logits, rows in zip(steps.steps, found, steps.rows, strict=True):
        expected = torch.stack([wanted[s][at] for s, at in rows])
        error = relative_error(logits[: len(rows)], expected)
        assert error < allowed, f"{step.regime}: relative error {error:.1e} of {allowed:.1e}"
