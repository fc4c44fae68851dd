"""`sitsc lint`: findings for people and programs, and exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from sitsc.models.presets import preset
from tests.commands.command_line import call
from tests.frontend.onnx_files import small_decoder


def write(root: Path, **changes: Any) -> Path:
    """A folder with a config alone."""
    (root / "config.json").write_text(json.dumps(preset("tiny-llama") | changes))
    return root


def test_a_good_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    done = call(capfd, "lint", write(tmp_path))
    assert done.code == 0 and done.err == ""
    assert done.out.splitlines()[0] == "model    llama"
    assert done.out.splitlines()[-1] == "ok: nothing speaks against compiling it"


def test_every_finding_has_its_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    root = write(tmp_path, odd=1, quantization_config={"bits": 4}, rope_theta=-1)
    done = call(capfd, "lint", root, "--keys")
    errors = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert done.code == 1 and done.err == "" and len(errors) == 3
    assert "unknown key 'odd' = 1 [config.json] — if it changes nothing" in errors[0]
    assert "quantization_config = {'bits': 4} cannot be used" in errors[1]
    assert "rope_theta = -1" in errors[2]
    assert "rms_norm_eps" in done.out and "odd " in done.out
    allowed = ("--allow-unknown-key", "odd", "--allow-unknown-key", "quantization_config")
    (error,) = [
        line
        for line in call(capfd, "lint", root, *allowed).out.splitlines()
        if line.startswith("error: ")
    ]
    assert "rope_theta" in error


def test_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    done = call(capfd, "lint", write(tmp_path, odd=1), "--json")
    value = json.loads(done.out)
    assert done.code == 1 and value["ok"] is False
    assert [f["level"] for f in value["findings"]] == ["error"]
    assert {"key": "odd", "use": "unknown", "value": "1"} in value["keys"]


def test_no_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    call(capfd, "lint", tmp_path / "none").refused(2, "no such model")


def test_a_family_without_an_entry_is_tried_and_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    changes = {"model_type": "helium", "architectures": ["HeliumForCausalLM"]}
    done = call(capfd, "lint", write(tmp_path, **changes))
    assert done.code == 0
    assert "warning: model_type 'helium' is not tested: it is compiled as transformers has it" in (
        done.out
    )
    other = write(tmp_path, **changes, clip_qkv=8.0)
    assert "unknown key 'clip_qkv'" in call(capfd, "lint", other).out


def test_options_that_nothing_reads_are_errors(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    done = call(capfd, "lint", write(tmp_path), "--dtype", "int4")
    assert done.code == 2 and "--dtype 'int4' is unknown" in done.err
    path = tmp_path / "model.onnx"
    path.write_bytes(small_decoder().SerializeToString())
    for option in (["--weights"], ["--dtype", "bfloat16"]):
        done = call(capfd, "lint", path, *option)
        assert done.code == 2 and f"{option[0]} is for decoders" in done.err
