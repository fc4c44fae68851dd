"""`sitsc bench` for GPUs, without one: keys, comparison, table, file and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.commands.bench_cuda import (
    GpuOptions,
    measure_rows,
    read_peers,
    results_file,
    show,
    write,
)
from sitsc.commands.bench_report import (
    Row,
    decode_key,
    peer_figures,
    report_value,
    start_phases,
    table_rows,
    ttft_key,
)
from sitsc.core.artifact import sign
from sitsc.core.errors import OptionError
from sitsc.runtime.loader import load
from tests.commands.artifact_edits import copy, edit_manifest, edit_plan
from tests.commands.command_line import call

PEERS: dict[str, Any] = {
    "about": "figures of others",
    "ceilings": {"read_TBps": 4.5, "weights_read_GB": {"m": 15.0}},
    "limit_tpot_ms": {"m": 3.3},
    "vllm": {
        "m": {"start_s": 60.0, "bs1_ctx128": 4.0, "ttft_512": 16.0, "note": "x", "rate 8": {}},
        "other": {"bs1_ctx128": 1.0},
    },
    "hf": {"m": {"eager_bs1_tpot": 64.4}},
}
CEILINGS = {"read_TBps": 0.02, "matmul_8192_bf16_TFLOPs": 0.1}


def report(tmp: dict[str, Any] | None = None) -> dict[str, Any]:
    rows = [
        Row("bs1_ctx128", 2.0, 1.5, 1.9, 4.0),
        Row("ttft_512", 20.0, 10.0, None, 16.0),
        Row("start_s", 6.0, None, None, 60.0),
    ]
    start = {"first_token_s": 6.0, "timeline_s": {"python": 1.0, "load": 3.0, "first_token": 2.0}}
    start["load_s"] = {"open": 0.5, "graphs": 2.0}
    detail = {"start": start | {"phases_s": start_phases(start)}}
    detail["memory"] = {"planned_bytes": 1000, "peak_bytes": 990}
    facts = {"hardware": "NVIDIA H200", "target": "h200"} | (tmp or {})
    skipped = {"bs256_ctx512": "does not fit"}
    return report_value("m", facts, rows, skipped, peer_figures(PEERS, "m"), detail)


def test_a_comparison_is_a_look_up():
    value = report()
    assert value["sitsc"]["m"].keys() == value["vllm"]["m"].keys()
    ratio = {k: value["vllm"]["m"][k] / v for k, v in value["sitsc"]["m"].items()}
    assert ratio == {"bs1_ctx128": 2.0, "ttft_512": 0.8, "start_s": 10.0}
    assert value["fraction_of_limit"] == {"bs1_ctx128": 0.75, "ttft_512": 0.5}
    assert value["step_ms"] == {"bs1_ctx128": 1.9}
    assert "hf" not in value and value["skipped"] == {"bs256_ctx512": "does not fit"}
    assert json.loads(json.dumps(value)) == value


def test_peers_are_only_what_has_our_keys():
    assert peer_figures(PEERS, "other") == {"vllm": {"bs1_ctx128": 1.0}}
    assert peer_figures(PEERS, "unknown") == {} and peer_figures({}, "m") == {}
    assert decode_key(8, 128) == "bs8_ctx128" and ttft_key(512) == "ttft_512"


def test_the_table_leaves_nothing_out():
    rows = [Row("bs1_ctx128", 2.0, 1.5, 1.9, 4.0), Row("ttft_512", 120.0)]
    cells = table_rows(rows, {"bs9_ctx1": "why"})
    assert cells[0] == ("bs1_ctx128", "2.000", "1.900", "1.500", "0.75", "4.000", "2.00x")
    assert cells[1] == ("ttft_512", "120.0", "", "", "", "", "")
    assert cells[2][:3] == ("bs9_ctx1", "skipped", "why")


def test_what_is_printed(capsys):
    show(report())
    text = capsys.readouterr().out
    for part in ("m on NVIDIA H200, peer vllm", "2.00x", "0.75", "skipped bs256_ctx512: does not"):
        assert part in text
    assert "load: graphs 2.00, load: other 0.50" in text and "0.990 of the plan's" in text


@given(
    st.dictionaries(st.sampled_from(["open", "weights", "graphs"]), st.floats(0, 10)),
    st.floats(0, 100),
    st.floats(0, 100),
)
def test_phases_of_a_start_sum_to_the_whole(inside, load_s, rest):
    timeline = {"python": rest, "load": load_s, "first_token": 0.5}
    phases = start_phases({"timeline_s": timeline, "load_s": inside})
    assert sum(phases.values()) == pytest.approx(sum(timeline.values()))
    assert next(iter(phases)) == "python" and list(phases)[-1] == "first_token"


def test_files(tmp_path: Path):
    assert results_file(tmp_path, "h200", "m") == tmp_path / "h200_m.json"
    assert results_file(tmp_path / "x.json", "h200", "m") == tmp_path / "x.json"
    path = write(report(), tmp_path / "new" / "x.json")
    assert json.loads(path.read_text())["sitsc"]["m"]["bs1_ctx128"] == 2.0
    (tmp_path / "bad.json").write_text("[]")
    for name in ("bad.json", "none.json"):
        with pytest.raises(OptionError, match="holds no peers"):
            read_peers(tmp_path / name)


def test_usual_rows_and_those_asked_for():
    assert (256, 512) in GpuOptions().grid and GpuOptions().decode_steps == 192
    assert GpuOptions(batches=(1, 2), contexts=(8,)).grid == ((1, 8), (2, 8))
    assert GpuOptions(batches=(3,)).grid == ((3, 128),)
    assert GpuOptions(quick=True).decode_steps < 192 and GpuOptions(steps=9).decode_steps == 9
    with pytest.raises(OptionError, match="--context 0"):
        GpuOptions(contexts=(0,)).check()


def test_rows_of_a_real_engine(tiny_artifact):
    """Measured on the CPU: what fits the plan has figures, what does not says why."""
    options = GpuOptions(batches=(1, 4, 99), contexts=(16,), prompts=(16, 10**6), quick=True)
    detail: dict[str, Any] = {}
    plan = load(tiny_artifact)
    rows, skipped = measure_rows(plan, options, CEILINGS, detail)
    assert [row.key for row in rows] == ["bs1_ctx16", "bs4_ctx16", "ttft_16"]
    assert all(row.value > 0 and row.limit and row.step is None for row in rows)
    assert set(skipped) == {"bs99_ctx16", "ttft_1000000"}
    assert "--batch 99" in skipped["bs99_ctx16"] and "does not fit" in skipped["ttft_1000000"]
    assert detail["bs4_ctx16"]["steps"] == options.decode_steps


def gpu_artifact(tiny_artifact: Path, tmp_path: Path) -> Path:
    artifact = copy(tiny_artifact, tmp_path)
    edit_plan(artifact, lambda plan: plan["target"].update(name="h200", isa="sm_90"))
    edit_manifest(artifact, target="h200")
    sign(artifact)
    return artifact


def test_refusals(tiny_artifact, tmp_path, capfd):
    artifact = gpu_artifact(tiny_artifact, tmp_path)
    call(capfd, "bench", artifact).refused(2, "the artifact is for h200 (sm_90)")
    call(capfd, "bench", artifact, "--peers", tmp_path / "none").refused(2, "holds no peers")
    call(capfd, "bench", artifact, "--batch", "0").refused(2, "--batch 0")
    call(capfd, "bench", artifact, tiny_artifact).refused(2, "measured alone")
    call(capfd, "bench", artifact, "--steps", "3").refused(2, "--steps 3")
    call(capfd, "bench", tiny_artifact, "--nvtx").refused(2, "--nvtx is for artifacts of GPUs")
    call(capfd, "bench", tiny_artifact, "--random-weights").refused(2, "--random-weights")
    call(capfd, "verify", tiny_artifact, "--on-device").refused(2, "--on-device checks GPUs")
    call(capfd, "verify", tiny_artifact, "--random-weights").refused(2, "are for --on-device")
    result = call(capfd, "verify", artifact, "--on-device", "--random-weights")
    assert result.code != 0 and len(result.err.splitlines()) == 1
