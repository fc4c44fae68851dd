"""`sitsc bench`: figures of what was asked for, or one line that says why not."""

import json
from pathlib import Path

import pytest

from sitsc.core.errors import ExecutionError, MemoryPlanError, SitscError, VerifyError
from sitsc.runtime.probe import error_of, told
from tests.commands.command_line import spawn

FAST = ("--steps", "8", "--context", "16", "--prompt", "16")


def test_results_of_two_artifacts_are_kept_side_by_side(tiny_artifact, tmp_path):
    out = tmp_path / "results" / "tiny.json"
    done = spawn("bench", tiny_artifact, *FAST, "--batch", "1", "--batch", "4", "-o", out)
    assert done.code == 0, done.err
    report = json.loads(out.read_text())
    [first] = report["results"].values()
    assert [d["batch"] for d in first["decode"]] == [1, 4]
    assert all(d["tokens_per_s"] > 0 for d in first["decode"])
    assert 0 < first["fraction_of_limit"] < 2
    assert first["ttft_ms"]["16"] > 0
    phases = first["start"]["timeline_s"]
    assert sum(phases.values()) == pytest.approx(first["start"]["first_token_s"])
    assert report["ceilings"]["read_bytes_per_s"] > 1e9 and report["versions"]["torch"]
    value = report | {"peers": {"other": 1}}
    out.write_text(json.dumps(value))
    again = spawn("bench", tiny_artifact, *FAST, "-o", out, "--json")
    assert again.code == 0 and json.loads(again.out)["results"]
    assert json.loads(out.read_text())["peers"] == {"other": 1}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--batch", "0"), "--batch 0"),
        (("--batch", "1000"), "--batch 1000"),
        (("--steps", "100000"), "steps"),
        (("--context", "0"), "tokens"),
        (("--prompt", "1000000"), "tokens"),
        (("--text", "no-such-file"), "no such text"),
    ],
)
def test_what_cannot_be_measured_is_refused(tiny_artifact, options, says):
    spawn("bench", tiny_artifact, *options).refused(2, says)


def test_a_results_file_that_is_none_is_refused_before_measuring(tiny_artifact, tmp_path: Path):
    out = tmp_path / "bad.json"
    out.write_text("{")
    spawn("bench", tiny_artifact, "-o", out).refused(2, "holds no results")
    assert out.read_text() == "{"


@pytest.mark.parametrize(
    "error",
    [
        MemoryPlanError("not enough memory", where="art", hint="a smaller model"),
        VerifyError("kernel x was altered"),
    ],
)
def test_a_probe_hands_its_mistake_over(error: SitscError):
    found = error_of(f"noise\n{told(error)}\n", "a warning\n", "a process")
    assert (type(found), str(found), found.exit_code) == (type(error), str(error), error.exit_code)


@pytest.mark.parametrize(
    "stdout", ["", "text", "[1]", '{"what": "x"}', '{"error": "NoSuchError", "what": "x"}']
)
def test_a_probe_that_told_nothing_is_an_execution_error(stdout: str):
    found = error_of(stdout, "Traceback\nKeyError: 'x'\n", "a process that runs art")
    assert type(found) is ExecutionError
    assert str(found) == "a process that runs art failed: KeyError: 'x'"
    assert "no message" in str(error_of(stdout, "", "a process"))
