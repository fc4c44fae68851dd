"""CUDA plans of mixture-of-experts models executed in Triton's interpreter, against their graph.

A ragged prefill of two sequences, then decode steps, one of them with idle rows.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sitsc import lowering
from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.interpreter import Interpreter
from sitsc.core.hardware import load_target
from sitsc.core.interpret import run_graph, step_inputs
from sitsc.core.options import CompileOptions
from sitsc.core.weights import materialise
from sitsc.models.random_checkpoint import write_random
from sitsc.passes.cuda_planner import make_cuda_plan
from sitsc.pipeline import inspect
from tests.cuda_families import CUDA_EXPERTS
from tests.cuda_plan_interpreter import PlanStep, run_plan

IDS = [[(7 * i * i + 3 * i + k) % 250 for i in range(21)] for k in (1, 4)]
LENGTHS = (17, 6)
OPTIONS = CompileOptions(
    target="a100", max_context=64, max_batch=4, prefill_chunk_tokens=32, kv_tokens=256
)


def _steps(regimes: list[str]) -> list[PlanStep]:
    """Prefill of both, two tokens each in a bucket of four, then one of each alone."""
    prefill = next(name for name in regimes if name.startswith("prefill"))
    first, second = LENGTHS
    ids = IDS[0][:first] + IDS[1][:second]
    positions = [*range(first), *range(second)]
    start = [0, first, first + second]
    steps = [
        PlanStep(prefill, ids, positions, start, [0, 0], [[1], [3]], [first - 1, start[2] - 1])
    ]
    for turn in range(2):
        at = [n + turn for n in LENGTHS]
        tokens = [IDS[k][at[k]] for k in range(2)] + [0, 0]
        lens, tables = [*at, -1, -1], [[1], [3], [0], [0]]
        steps.append(
            PlanStep("decode_4", tokens, [*at, 0, 0], [0, 1, 2, 3, 4], lens, tables, [0, 1])
        )
    for k in range(2):
        at, table = LENGTHS[k] + 2, [[1], [3]][k]
        steps.append(PlanStep("decode_1", [IDS[k][at]], [at], [0, 1], [at], [table], [0]))
    return steps


@pytest.mark.parametrize("name", CUDA_EXPERTS)
def test_the_plan_computes_what_its_graph_does(name: str, tmp_path: Path):
    checkpoint = inspect(write_random(CUDA_EXPERTS[name], tmp_path / "model"), OPTIONS)
    dtypes = lowering.resolve_dtypes(checkpoint.config, OPTIONS)
    module = lowering.trace(checkpoint.config, dtypes.torch_dtype)
    numerics = lowering.run(module, dtypes, OPTIONS, None)
    data = load_target("a100")
    assert data.cuda is not None
    provider = CudaProvider("a100", replace(data.cuda, num_sms=4))  # fewer programs
    facts = lowering.model_facts(checkpoint, OPTIONS)
    plan, _ = make_cuda_plan(module.graph, facts, OPTIONS, numerics, data, provider)
    kinds = {x.template for r in plan.regimes for g in r.groups for x in g.launches}
    assert {"moe_route", "moe_sort", "moe_linear", "moe_sum"} <= kinds

    class Weights:
        """Rows of the checkpoint."""

        def read(self, tensor: str, start: int, stop: int) -> Tensor:
            return checkpoint.read(tensor, (start, stop))

    reader = Weights()
    weights = {spec.name: materialise(spec, reader.read) for spec in plan.model.parameters}
    wanted = [
        run_graph(module.graph, reader, step_inputs(module.graph, ids, OPTIONS.page_size))
        for ids in IDS
    ]
    with Interpreter() as interpreter:
        names = [regime.name for regime in plan.regimes]
        found = interpreter.call(run_plan, plan, provider.sources, weights, _steps(names))
    rows = [(found[0][k], wanted[k][LENGTHS[k] - 1]) for k in range(2)]
    rows += [(found[1 + t][k], wanted[k][LENGTHS[k] + t]) for t in range(2) for k in range(2)]
    rows += [(found[3 + k][0], wanted[k][LENGTHS[k] + 2]) for k in range(2)]
    for got, want in rows:
        assert float((got - want).norm() / want.norm()) < 3e-2
    assert all(bool(torch.isfinite(got).all()) for got, _ in rows)
