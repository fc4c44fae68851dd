"""A CPU's shares of its ceilings, found again from figures that plans with such shares predict."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sitsc.actual_pipeline import residuals
from sitsc.core import calibration, plan_file
from sitsc.core.actual import (
    START,
    TPOT,
    TTFT,
    Actual,
    Measured,
    actual_of,
    actual_place,
    write_actual,
)
from sitsc.core.calibration import Calibration
from sitsc.core.errors import OptionError
from sitsc.core.hardware import load_target
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan, read_plan
from sitsc.core.records import from_value
from sitsc.cpu_calibration import calibrate_cpu, priced
from sitsc.models.random_checkpoint import write_random
from sitsc.passes.cost import reached
from sitsc.passes.plan_time import decode_seconds, plan_time, prompt_seconds
from sitsc.pipeline import inspect, plan_checkpoint
from tests.commands.artifact_edits import copy
from tests.commands.command_line import call

PLANS = Path(__file__).parents[1] / "plans"
CPU = load_target("cpu")
SHARES = {"read_share": 0.4, "matmul_share": 0.7}
STEPS = ((1, 100), (1, 900), (4, 300), (8, 500))
PROMPTS = (40, 200, 512, 1500)


def stored(name: str) -> Plan:
    return read_plan(plan_file.read_text(PLANS / f"{name}.cpu.json.xz"))


def measured(plan: Plan, shares: dict[str, float], name: str = "some") -> Actual:
    """What a machine with such shares would measure."""
    slower = priced(plan, shares)
    time = plan_time(slower)
    points = [
        Measured(f"bs{n}_ctx{c}", TPOT, 1e3 * decode_seconds(slower, time, n, c), n, c)
        for n, c in STEPS
    ]
    points += [
        Measured(f"ttft_{n}", TTFT, 1e3 * prompt_seconds(slower, time, n), tokens=n)
        for n in PROMPTS
    ]
    points.append(Measured("start_s", START, 9.0, weights_bytes=plan.memory.weights_bytes))
    facts = {"hardware": "a CPU", "versions": {}, "commit": "", "date": "2031-01-01"}
    digests = plan.sha256(), plan.runs()
    return actual_of(facts, digests=digests, model=name, target="cpu", points=points, memory=None)


@pytest.fixture(scope="module")
def small() -> Plan:
    return stored("smollm2-135m")


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen3-30b-a3b"])
def test_its_own_shares_give_the_plan_itself(name: str):
    plan = stored(name)
    again = priced(plan, {share: reached(plan.target, share) for share in SHARES})
    for mine, theirs in zip(plan.regimes, again.regimes, strict=True):
        assert theirs.predicted_us == pytest.approx(mine.predicted_us, rel=1e-4)
    assert again.runs() == plan.runs()


def test_shares_are_found_again(small: Plan):
    made = calibrate_cpu(CPU, [(small, measured(small, SHARES))])
    for name, share in SHARES.items():
        assert made.value(name) == pytest.approx(share, rel=2e-3), name
    assert made.worst_error < 5e-3 and len(made.residuals) == len(STEPS) + len(PROMPTS)
    assert [r.point for r in made.residuals if r.fitted] == ["bs1_ctx100", "ttft_512"]
    assert "ttft_512 of some, a CPU, 2031-01-01" in made.parameters["matmul_share"].source
    rate = CPU.target.ceilings["weights_load_bytes_per_s"].value
    assert made.value("start_seconds") == pytest.approx(9 - small.memory.weights_bytes / rate, 1e-3)


def test_the_largest_model_says_both(small: Plan):
    large = stored("llama32-1b")
    made = calibrate_cpu(
        CPU,
        [(small, measured(small, {"read_share": 0.9, "matmul_share": 0.9}, "small")),
         (large, measured(large, SHARES, "large"))],
    )  # fmt: skip
    assert made.value("read_share") == pytest.approx(SHARES["read_share"], rel=2e-3)
    assert {r.model for r in made.residuals if r.fitted} == {"large"}
    assert made.worst_error > 0.5  # the small one was much faster


def test_plans_are_predicted_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As measured, with error bars of what was not fitted, and the same things run."""
    model = write_random("tiny-llama", tmp_path / "model", headers_only=True)
    options = CompileOptions()
    before = plan_checkpoint(inspect(model, options), options).plan
    actual = measured(before, SHARES)
    one = next(p for p in actual.points if p.key == "bs8_ctx500")
    others = tuple(p for p in actual.points if p is not one)
    actual = replace(actual, points=(*others, replace(one, value=1.25 * one.value)))
    made = calibrate_cpu(CPU, [(before, actual)])
    monkeypatch.setattr(calibration, "load_calibration", lambda target: made)
    after = plan_checkpoint(inspect(model, options), options).plan
    assert after.runs() == before.runs() and after.sha256() != before.sha256()
    assert after.target.ceilings["read_share"].source.startswith("fitted to bs1_ctx100")
    lines = {line.name: line for line in residuals(after, actual).ends}
    for name, line in lines.items():
        wanted = -0.2 if name == "bs8_ctx500" else 0.0
        assert line.error == pytest.approx(wanted, abs=5e-3), name
    assert lines["bs8_ctx500"].bar == pytest.approx(0.2, abs=5e-3)
    again = calibrate_cpu(CPU, [(after, actual)])  # by plans that know the shares already
    for name in SHARES:
        assert again.value(name) == pytest.approx(made.value(name), rel=2e-3)


@pytest.mark.parametrize("kind", [TPOT, TTFT])
def test_both_kinds_of_point_are_needed(small: Plan, kind: str):
    actual = measured(small, SHARES)
    few = replace(actual, points=tuple(p for p in actual.points if p.kind == kind))
    with pytest.raises(OptionError, match="a decode step and a prompt"):
        calibrate_cpu(CPU, [(small, few)])


def test_the_command(tiny_artifact: Path, tmp_path: Path, capfd):
    artifact = copy(tiny_artifact, tmp_path)
    plan = read_plan((artifact / "plan.json").read_text())
    table = tmp_path / "cpu.json"
    arguments = ("plan", "calibrate", "cpu", artifact, "-o", table)
    call(capfd, *arguments).refused(2, "no measurements")
    write_actual(measured(plan, SHARES), actual_place(artifact))
    done = call(capfd, *arguments)
    assert done.code == 0 and "read_share" in done.out and "written to cpu.json" in done.out
    made = from_value(Calibration, json.loads(table.read_text()), "cpu")
    assert made.target == "cpu"
    assert made.value("read_share") == pytest.approx(SHARES["read_share"], rel=2e-3)
    file = ("plan", "calibrate", "cpu", actual_place(artifact), "-o", table)
    call(capfd, *file).refused(2, "need their plan")
    gpu = ("plan", "calibrate", "h200", artifact, "-o", table)
    call(capfd, *gpu).refused(2, "cpu")
    write_actual(replace(measured(plan, SHARES), plan="0" * 64, runs=""), actual_place(artifact))
    call(capfd, *arguments).refused(2, "measured of plan 000000000000")
