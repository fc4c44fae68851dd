"""Measurements become a target's table: which points are fitted, what stays, what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.calibrate import MODELS
from sitsc.calibration_pipeline import calibrate
from sitsc.core.actual import Actual, read_actual, write_actual
from sitsc.core.calibration import Calibration, load_calibration
from sitsc.core.errors import OptionError
from sitsc.core.records import from_value
from tests.commands.command_line import call
from tests.partition_records import record

RESULTS = Path(__file__).parents[1] / "bench" / "results"


@pytest.fixture(scope="module")
def results() -> dict[str, Actual]:
    return {name: read_actual(RESULTS / f"h200_{name}.json") for name in MODELS}


def slower(actual: Actual, key: str, factor: float) -> Actual:
    """The same, but for one figure."""
    points = tuple(
        replace(p, value=p.value * (factor if p.key == key else 1)) for p in actual.points
    )
    return replace(actual, points=points, date="2031-01-01")


def by_point(made: Calibration) -> dict[tuple[str, str], Any]:
    return {(r.model, r.point): r for r in made.residuals}


def test_points_are_folded_into_those_before(results):
    """What was measured again counts anew, with its source; all else is as it was."""
    before = load_calibration("h200")
    assert before is not None
    again = slower(results["llama32-1b"], "ttft_512", 2.0)
    made = calibrate("h200", [again], record)
    mine, theirs = by_point(made), by_point(before)
    assert set(mine) == set(theirs)
    assert mine["llama3-8b", "bs1_ctx128"].source == theirs["llama3-8b", "bs1_ctx128"].source
    assert "2031-01-01" in mine["llama32-1b", "bs1_ctx128"].source
    host = made.parameters["host_seconds"]
    assert host.value == pytest.approx(2 * before.value("host_seconds"), rel=0.02)
    assert "ttft_512 of llama32-1b" in host.source and "2031-01-01" in host.source
    assert abs(mine["llama32-1b", "ttft_512"].error) < 2e-3
    for name in ("kernel_seconds", "read_share", "flops_per_exp"):
        assert made.value(name) == pytest.approx(before.value(name), rel=5e-3), name


def test_what_no_point_shows_stays(results):
    """One model alone, decode alone: shares of prompts and the host's time are those before."""
    before = load_calibration("h200")
    assert before is not None
    only = results["llama3-8b"]
    few = replace(only, points=tuple(p for p in only.points if p.kind == "tpot"))
    made = calibrate("h200", [few], record, fresh=True)
    assert {r.model for r in made.residuals} == {"llama3-8b"}
    for name in ("matmul_share", "host_seconds", "start_seconds"):
        assert made.parameters[name] == before.parameters[name]
    assert {r.point for r in made.residuals if r.fitted} == {
        "bs1_ctx128",
        "bs32_ctx1024",
        "bs256_ctx512",
    }
    other = calibrate("a100", [replace(few, target="a100")], record)
    assert other.target == "a100" and other.value("host_seconds") == before.value("host_seconds")
    with pytest.raises(OptionError, match="no measured point"):
        calibrate("h200", [replace(only, points=())], record, fresh=True)


def test_the_command_writes_a_table(results, tmp_path, capfd, monkeypatch):
    def known(folder: Path, *rest: Any) -> Any:
        del rest
        return record(Path(folder).name)

    monkeypatch.setattr("sitsc.partition_pipeline.record_model", known)
    file, out = tmp_path / "m.actual.json", tmp_path / "h200.json"
    write_actual(results["llama3-8b"], file)
    result = call(
        capfd, "plan", "calibrate", "h200", file, RESULTS / "h200_llama32-1b.json", "-o", out
    )
    assert result.code == 0, result.err
    assert "kernel_seconds" in result.out and "bs1_ctx8192" in result.out
    assert "written to h200.json" in result.out and "not fitted" in result.out
    made = from_value(Calibration, json.loads(out.read_text()), "made")
    assert made.median_error < 0.05 and len(made.residuals) == 18
