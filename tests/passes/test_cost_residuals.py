"""The model against what was measured: files of bench/results, one device."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.calibrate import MODELS, points
from bench.partition import score
from sitsc.core.calibration import calibrated, load_calibration
from sitsc.core.hardware import load_target, target_names
from sitsc.passes.collectives import topology
from sitsc.passes.op_time import Cut, Sizes, device_of
from sitsc.passes.step_time import StepModel
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
