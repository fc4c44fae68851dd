"""Measured against predicted: `bench` leaves actual.json, `plan show --actual` reads it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sitsc.actual_pipeline import residuals
from sitsc.core.actual import (
    SCHEMA,
    Actual,
    Measured,
    MeasuredKernels,
    MeasuredMemory,
    actual_place,
    read_actual,
    write_actual,
)
from sitsc.core.artifact import open_artifact
from sitsc.core.errors import PlanError, SitscError
from sitsc.core.plan import Plan
from tests.commands.artifact_edits import copy
from tests.commands.command_line import call

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def actual_of(plan: Plan, points: tuple[Measured, ...] = ()) -> Actual:
    machine = {"hardware": "a machine", "versions": {"torch": "2"}, "commit": "abc", "date": "d"}
    memory = MeasuredMemory(plan.memory.total_bytes // 2, plan.memory.total_bytes)
    digests = (plan.sha256(), plan.runs())
    return Actual(
        SCHEMA, *digests, "tiny", "cpu", **machine, points=points, memory=memory, kernels=()
    )


def decode(plan: Plan, many: int, ms: float) -> Measured:
    context = next(r.sizes["context"] for r in plan.regimes if r.name == f"decode_{many}")
    return Measured(f"bs{many}_ctx1", "tpot", ms, sequences=many, context=context)


def test_bench_leaves_what_show_reads(tiny_artifact, tmp_path, capfd):
    """On the CPU, from measuring to residuals; the artifact still verifies."""
    artifact = copy(tiny_artifact, tmp_path)
    fast = ("--steps", "8", "--context", "16", "--prompt", "16", "--batch", "1", "--batch", "4")
    assert call(capfd, "bench", artifact, *fast).code == 0
    place = actual_place(artifact)
    assert place.name == f"{artifact.name}.actual.json" and place.parent == artifact.parent
    text = place.read_text()
    actual = read_actual(place)
    assert actual.text() == text and str(tmp_path) not in text
    assert [p.key for p in actual.points] == ["bs1_ctx16", "bs4_ctx16", "ttft_16", "start_s"]
    assert actual.plan == open_artifact(artifact).plan.sha256()
    assert call(capfd, "verify", artifact).code == 0
    shown = call(capfd, "plan", "show", artifact, "--actual")
    assert shown.code == 0, shown.err
    for part in (
        "end to end",
        "bs4_ctx16",
        "ttft_16",
        "start_s",
        "± 30.0 %",
        "peak",
        "not measured",
    ):
        assert part in shown.out, part
    value = json.loads(call(capfd, "plan", "show", artifact, "--actual", "--json").out)
    assert [row["name"] for row in value["end_to_end"]] == [p.key for p in actual.points]
    moved = place.rename(tmp_path / "elsewhere.json")
    call(capfd, "plan", "show", artifact, "--actual").refused(2, "no measurements", "sitsc bench")
    plan = artifact / "plan.json"
    again = call(capfd, "plan", "show", plan, "--actual-from", moved)
    assert again.code == 0 and "bs1_ctx16" in again.out


def test_residuals_are_those_of_the_same_sizes(tiny_artifact):
    """A bucket at its own context has the plan's prediction, a shorter one less attention."""
    plan = open_artifact(tiny_artifact).plan
    said = plan.predictions["tpot_decode_4"]
    near = decode(plan, 4, said.value / 1.1)
    far = replace(near, key="bs4_half", context=near.context / 2)
    first, second = residuals(plan, actual_of(plan, (near, far))).ends
    assert first.predicted == pytest.approx(said.value) and first.bar == said.error
    assert first.error == pytest.approx(0.1) and not first.outside
    assert second.predicted < first.predicted
    slow = residuals(plan, actual_of(plan, (decode(plan, 4, 2 * said.value),))).ends[0]
    assert slow.error == pytest.approx(-0.5) and slow.outside


def test_a_start_counts_the_weights_that_were_read(tiny_artifact):
    plan = open_artifact(tiny_artifact).plan
    whole = plan.predictions["cold_start"].value
    rate = plan.target.ceilings["weights_load_bytes_per_s"].value
    for read in (plan.memory.weights_bytes, 0):
        point = Measured("start_s", "cold_start", 1.0, weights_bytes=read)
        line = residuals(plan, actual_of(plan, (point,))).ends[0]
        assert line.predicted == pytest.approx(whole - (plan.memory.weights_bytes - read) / rate)


def test_measurements_of_another_plan_are_refused(tiny_artifact):
    plan = open_artifact(tiny_artifact).plan
    other = replace(actual_of(plan), plan="0" * 64)
    assert residuals(plan, other).memory  # the same things run, predicted otherwise
    for runs in ("", "1" * 64):
        with pytest.raises(PlanError, match="measured of plan 0000"):
            residuals(plan, replace(other, runs=runs))


def test_kernel_classes(tiny_artifact, tmp_path, capfd):
    plan = open_artifact(tiny_artifact).plan
    us = {"aotinductor": 50.0, "library": 3.0}
    kernels = (MeasuredKernels("bs1_ctx1", 1, 1.0, us),)
    file = tmp_path / "actual.json"
    write_actual(replace(actual_of(plan), kernels=kernels), file)
    out = call(capfd, "plan", "show", tiny_artifact, "--actual-from", file).out
    assert "kernels of a step, bs1_ctx1" in out and "library" in out and "together" in out


def test_kernels_of_a_step_that_the_plan_does_not_have(tiny_artifact):
    plan = open_artifact(tiny_artifact).plan
    kernels = (MeasuredKernels("bs999", 999, 1.0, {"library": 1.0}),)
    with pytest.raises(PlanError, match="no step of this plan has 999 sequences"):
        residuals(plan, replace(actual_of(plan), kernels=kernels))


@pytest.mark.parametrize("model", ["llama3-8b", "llama32-1b"])
def test_results_of_a_gpu_are_measurements(model):
    report = json.loads((RESULTS / f"h200_{model}.json").read_text())
    actual = read_actual(RESULTS / f"h200_{model}.json")
    assert {p.key: p.value for p in actual.points} == report["sitsc"][model]
    assert (actual.plan, actual.target, actual.runs) == (report["plan"], "h200", "")
    assert actual.memory is not None and actual.versions["driver"] == report["driver"]
    assert {p.weights_bytes for p in actual.points} == {0}  # random weights


def test_what_is_no_measurement(tiny_artifact, tmp_path, capfd):
    plan = open_artifact(tiny_artifact).plan
    good = json.loads(actual_of(plan, (decode(plan, 1, 1.0),)).text())
    row = {"key": "bs1", "sequences": 1, "context": 1.0, "us": {"library": 1.0}}
    bad = {
        "cut": actual_of(plan).text()[:50],
        "list": "[]",
        "newer": json.dumps(good | {"schema": 2}),
        "extra": json.dumps(good | {"more": 1}),
        "none": json.dumps(good | {"points": [good["points"][0] | {"value": 0.0}]}),
        "kind": json.dumps(good | {"points": [good["points"][0] | {"kind": "speed"}]}),
        "report": json.dumps({"sitsc": {}}),
        "nan": json.dumps(good | {"points": [good["points"][0] | {"value": float("nan")}]}),
        "context": json.dumps(good | {"points": [good["points"][0] | {"context": -1.0}]}),
        "peak": json.dumps(good | {"memory": good["memory"] | {"peak_bytes": 0}}),
        "kernels": json.dumps(good | {"kernels": [row | {"us": {"library": -1.0}}]}),
        "rows": json.dumps(good | {"kernels": [row | {"sequences": 0}]}),
    }
    for name, text in bad.items():
        (tmp_path / f"{name}.json").write_text(text)
        with pytest.raises(SitscError):
            read_actual(tmp_path / f"{name}.json")
        show = ("plan", "show", tiny_artifact, "--actual-from", tmp_path / f"{name}.json")
        call(capfd, *show).refused(2)
    call(capfd, "plan", "show", tiny_artifact, "--actual", "--regime", "decode_1").refused(2)
    call(capfd, "bench", tiny_artifact, "--kernels").refused(
        2, "--kernels is for artifacts of GPUs"
    )
    call(capfd, "plan", "calibrate", "cpu", RESULTS).refused(2, "is not an artifact")
    call(capfd, "plan", "calibrate", "h999", RESULTS).refused(2, "unknown target")
    call(capfd, "plan", "calibrate", "h200", tmp_path / "no").refused(2, "no measurements")
    file = RESULTS / "h200_llama3-8b.json"
    call(capfd, "plan", "calibrate", "h100", file).refused(2, "measured on h200, not h100")
