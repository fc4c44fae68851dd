"""The model against what was measured: files of bench/results, one device."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.calibrate import MODELS, points
from bench.partition import of_ranks, score
from sitsc.core.calibration import (
    Calibration,
    calibrated,
    calibration_for,
    load_calibration,
    measured_error,
    rank_residuals,
    residuals_text,
)
from sitsc.core.hardware import load_target, target_names
from sitsc.core.parallel import Partition
from sitsc.passes.collectives import topology
from sitsc.passes.op_time import Cut, Sizes, device_of
from sitsc.passes.partition import Candidate, Search, machine
from sitsc.passes.step_time import StepModel
from sitsc.passes.workloads import Slo, Workload
from tests.partition_records import record

ROOT = Path(__file__).parents[2]
FITTED = {("llama3-8b", f"bs{where}") for where in ("1_ctx128", "32_ctx1024", "256_ctx512")}
FITTED |= {("llama3-8b", "ttft_2048"), ("llama32-1b", "ttft_512")}


def model_of(name: str) -> StepModel:
    device = device_of(load_target("h200"), load_calibration("h200"))
    return StepModel(record(name), device, topology(1, 1, "nvlink", "infiniband"))


@pytest.fixture(scope="module")
def models() -> dict[str, StepModel]:
    return {name: model_of(name) for name in MODELS}


def test_the_file_is_what_the_model_says(models):
    """Committed residuals are those of today's model and results: median 5 %, worst 15 %."""
    made = load_calibration("h200")
    assert made is not None
    known = points("h200")
    assert {(r.model, r.point) for r in made.residuals} == set(known)
    for r in made.residuals:
        sizes, ms = known[r.model, r.point]
        assert r.measured_ms == ms
        predicted = models[r.model].step_us(sizes, Cut()) / 1e3
        assert predicted == pytest.approx(r.predicted_ms, rel=2e-3), (r.model, r.point)
    scored = [abs(r.error) for r in made.residuals if not r.fitted]
    assert len(scored) == len(known) - 5
    assert statistics.median(scored) == pytest.approx(made.median_error, rel=0.01)
    assert max(scored) == pytest.approx(made.worst_error, rel=0.01)
    assert made.median_error <= 0.05 and made.worst_error <= 0.15


def test_fitted_points_are_met():
    made = load_calibration("h200")
    assert made is not None
    fitted = [r for r in made.residuals if r.fitted]
    assert {(r.model, r.point) for r in fitted} == FITTED
    assert all(abs(r.error) < 2e-3 for r in fitted)
    sources = [made.parameters[name].source for name in ("read_share", "fill_power")]
    assert all("llama3-8b, NVIDIA H200" in source for source in sources)


def test_every_target_has_limits():
    assert "h200" in calibrated()
    for name in target_names():
        device = device_of(load_target(name), load_calibration(name))
        assert device.read > 0 and device.flops["bfloat16"] > 0


def test_measured_order_holds(models):
    """Of the points of one model the order of times is the measured one, but for near ties."""
    for name in MODELS:
        report = json.loads((ROOT / "bench/results" / f"h200_{name}.json").read_text())
        known = points("h200")
        rows = [k for k in report["sitsc"][name] if (name, k) in known]
        mine = {k: models[name].step_us(known[name, k][0], Cut()) for k in rows}
        for a in rows:
            for b in rows:
                if known[name, a][1] > 1.1 * known[name, b][1]:
                    assert mine[a] > mine[b], (name, a, b)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 5000), st.integers(0, 5000))
def test_more_work_takes_longer(a, b, low, more):
    """In sequences (within what one kind of kernel does) and in context."""
    model = model_of("llama32-1b")
    few, many = sorted((a, b))
    if (few <= 2) == (many <= 2) and (few <= 64) == (many <= 64) and many <= 64:
        assert model.whole(Sizes(few, few, few, low), Cut()).us <= (
            model.whole(Sizes(many, many, many, low), Cut()).us + 2 * 16 * model.device.kernel_us
        )
    one, two = (model.whole(Sizes(few, few, few, c), Cut()).us for c in (low, low + more))
    assert one <= two + 1e-6


@given(st.sampled_from((1, 8, 64, 512)), st.floats(1.0, 4.0))
def test_faster_hardware_is_never_slower(tokens, factor):
    model = model_of("llama32-1b")
    device = model.device
    faster = StepModel(
        model.record,
        replace(
            device,
            read=device.read * factor,
            flops={k: v * factor for k, v in device.flops.items()},
        ),
        model.where,
    )
    sizes = Sizes(tokens, tokens, tokens, 512)
    assert faster.whole(sizes, Cut()).us <= model.whole(sizes, Cut()).us


def test_scores_of_partitions(tmp_path):
    """The committed file is what the script writes; files of two devices join it by name."""
    models = {name: record(name) for name in MODELS}
    value = score("h200", models)
    committed = json.loads((ROOT / "bench/results/partition_h200.json").read_text())
    mine = {(p["model"], p["partition"], p["point"]): p for p in value["points"]}
    theirs = {(p["model"], p["partition"], p["point"]): p for p in committed["points"]}
    assert set(mine) == set(theirs)
    for key, point in mine.items():
        assert point["predicted_ms"] == pytest.approx(theirs[key]["predicted_ms"], rel=2e-3)
    assert committed["median_error"] <= 0.05 and committed["worst_error"] <= 0.15
    assert committed["order_kept"]
    assert rank_residuals("h200") == of_ranks("h200", committed).residuals

    text = (ROOT / "bench/results/h200_llama3-8b.json").read_text()
    report = json.loads(text)
    rows = report["sitsc"]["llama3-8b"]
    report["sitsc"]["llama3-8b"] = {key: ms / 1.7 for key, ms in rows.items()}
    (tmp_path / "h200_llama3-8b.json").write_text(text)
    (tmp_path / "h200_llama3-8b_tp2.json").write_text(json.dumps(report))
    two = score("h200", {"llama3-8b": models["llama3-8b"]}, tmp_path)
    assert {p["partition"] for p in two["points"]} == {"one rank", "TP 2"} and two["order_kept"]
    report["sitsc"]["llama3-8b"] = {key: ms * 1.7 for key, ms in rows.items()}
    (tmp_path / "h200_llama3-8b_tp2.json").write_text(json.dumps(report))
    assert not score("h200", {"llama3-8b": models["llama3-8b"]}, tmp_path)["order_kept"]


# --- error bars of several ranks --------------------------------------------------------------


def test_error_bars_hold_what_was_measured():
    """Around the prediction of a partition as `sitsc partition` shows it, also with both cuts."""
    known = rank_residuals("h200")
    assert {(r.tp, r.pp) for r in known} == {(2, 1), (1, 2)}
    data = load_target("h200")
    for r in known:
        where = Search(record(r.model), machine(data, topology(2, 1, "nvlink", "infiniband")))
        made = where.evaluate(Partition(r.tp, r.pp), Workload(512, 64, 8), Slo())
        assert isinstance(made, Candidate)
        bar = made.tpot_error if r.point.startswith("bs") else made.ttft_error
        assert abs(r.measured_ms - r.predicted_ms) <= bar * r.predicted_ms * 1.01, r.point


def test_error_bars_are_of_the_cuts_that_were_measured():
    """More cuts are never surer; GPUs that nobody has measured no surer than the reference."""
    data = load_target("h200")
    for kind in ("tpot", "ttft"):
        alone, tp, pp = (measured_error(data, kind, *n) for n in ((1, 1), (2, 1), (1, 2)))
        assert alone < tp and alone <= pp
        assert measured_error(data, kind, 4, 2) == max(tp, pp)
        assert measured_error(data, kind, 8, 1) == tp and measured_error(data, kind, 1, 8) == pp
        for name in target_names():
            other = load_target(name)
            if other.cuda is not None:
                assert measured_error(other, kind, 2, 1) >= tp
            else:
                assert measured_error(other, kind, 2, 1) == measured_error(other, kind)


def test_the_worst_that_is_told_is_the_worst_that_was_measured():
    committed = json.loads((ROOT / "bench/results/partition_h200.json").read_text())
    scored = [p for p in committed["points"] if not p["fitted"]]
    worst = max(scored, key=lambda p: abs(p["error"]))
    text = residuals_text(calibrated_target("h200"))
    assert f"median residual {100 * committed['median_error']:.1f} %" in text
    assert f"worst {100 * committed['worst_error']:.1f} % ({worst['partition']}, " in text
    assert f"{worst['point']} of {worst['model']})" in text
    alone = calibrated_target("cpu")
    assert f"residual {100 * alone.median_error:.1f} %" in residuals_text(alone)
    assert f"worst {100 * alone.worst_error:.1f} % (" in residuals_text(alone)


def calibrated_target(name: str) -> Calibration:
    made = calibration_for(load_target(name))
    assert made is not None
    return made
