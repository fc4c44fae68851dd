"""`sitsc verify --on-device` and the measurements of `sitsc bench`, on a GPU.

SITSC_GPU_ARTIFACT names an artifact for this GPU; it gets random weights.
"""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sitsc.core.artifact import sign
from sitsc.core.canonical import canonical_json
from sitsc.runtime import cuda_selftest, selftest_kernels
from sitsc.runtime.cuda_measure import measure_ceilings, measure_step
from sitsc.runtime.engine_measure import measure_tpot, measure_ttft
from sitsc.runtime.loader import load
from sitsc.runtime.selftest_findings import Finding, failures
from sitsc.runtime.selftest_reference import choose_lengths, make_texts
from sitsc.runtime.selftest_steps import StepRunner

pytestmark = pytest.mark.gpu
ARTIFACT = os.environ.get("SITSC_GPU_ARTIFACT", "")
Loaded = tuple[Any, cuda_selftest.Baseline]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    if not ARTIFACT or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_ARTIFACT")
    before = cuda_selftest.baseline()
    return load(ARTIFACT, random_weights=True), before


@pytest.fixture(scope="module")
def findings(loaded: Loaded) -> list[Finding]:
    return cuda_selftest.run_selftest(*loaded)


def test_nothing_fails(findings):
    assert failures(findings) == []


def test_every_regime_is_in_a_comparison(loaded, findings):
    regimes = {r.name for r in loaded[0].artifact.plan.regimes}
    judged = {f.name for f in findings if f.check == "kernels" and f.passed}
    assert regimes <= judged
    graphs = {f.name for f in findings if f.check == "graph"}
    assert graphs == {f.name for f in findings if f.check == "batch invariance"}


def kernels_of(session: Any) -> list[Finding]:
    """The kernels' check alone."""
    plan = session.artifact.plan
    texts = make_texts(plan, choose_lengths(plan))
    return selftest_kernels.check_kernels(
        session.artifact, StepRunner(session.executor, plan), texts
    )


@pytest.mark.parametrize("part", ["o_proj", "down_proj", "input_layernorm"])
def test_one_wrong_weight_is_noticed(loaded, part):
    """The reference reads one weight disturbed by a quarter; the kernels read the one as it was."""
    session, _ = loaded
    weights = session.executor.memory.weights
    name = next(n for n in weights if "layers.0." in n and part in n)
    kept = weights[name]
    noise = 1 + 0.25 * torch.randn_like(kept.float())
    weights[name] = (kept.float() * noise).to(kept.dtype)
    try:
        failed = failures(kernels_of(session))
    finally:
        weights[name] = kept
    assert {"kernels", "layers"} <= {finding.check for finding in failed}


def test_a_launch_that_is_left_out_is_noticed(loaded, tmp_path):
    """Only the bucket whose plan lacks a launch computes something else."""
    copy = tmp_path / "edited"
    shutil.copytree(Path(ARTIFACT), copy)
    plan = json.loads((copy / "plan.json").read_text())
    regime = [r for r in plan["regimes"] if r["kind"] == "decode"][1]
    group = next(g for g in regime["groups"] if g["layers"])
    del group["launches"][-1]
    (copy / "plan.json").write_text(canonical_json(plan))
    sign(copy)
    failed = failures(kernels_of(load(copy, random_weights=True)))
    assert {finding.name for finding in failed} == {regime["name"]}


def test_more_than_planned_is_noticed(loaded):
    session, before = loaded
    found = cuda_selftest.device_bytes(session.executor, before)
    plan = session.artifact.plan.memory
    small = replace(plan, total_bytes=int(0.9 * plan.total_bytes))
    assert [f.name for f in failures(cuda_selftest.memory_findings(small, found))]


def test_figures_are_those_of_a_gpu(loaded):
    session, _ = loaded
    found = measure_tpot(session, 1, 128, 32)
    step = measure_step(session.executor, session.artifact.plan, 1, 128)
    first = measure_ttft(session, 512, 3)
    print(f"{found.tpot_ms:.3f} ms a token, {step:.3f} ms a step, first {first.median_ms:.2f} ms")
    assert 0.9 * step < found.tpot_ms < 2 * step + 1
    assert not session.engine.has_work


def test_ceilings():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    found = measure_ceilings()
    assert 0 < found["read_TBps"] < 20 and found["copy_TBps"] < 20
    assert 0 < found["matmul_8192_bf16_TFLOPs"] < 5000
