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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ood", "'ood' is no key of the model — unknown: odd, quantization_config"),
        ("vocab_size", "'vocab_size' is consumed, not unknown — unknown: odd, quant"),
        ("rope_scaling.ood", "'rope_scaling.ood' is no key of the model"),
    ],
)
def test_a_name_that_lets_nothing_pass_is_an_error(name: str, why: str, tmp_path: Path, capfd):
    root = write(tmp_path, odd=1, quantization_config={"bits": 4})
    call(capfd, "lint", root, "--allow-unknown-key", name).refused(2, why)
    options = ("-o", tmp_path / "out", "--no-pack", "--allow-unknown-key", name)
    call(capfd, "compile", root, *options).refused(2, why)


def test_names_of_keys_within_a_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0, "odd": 1}
    root = write(tmp_path, rope_parameters=scaling, rope_theta=None)
    assert "'rope_parameters.odd' = 1" in call(capfd, "lint", root).out
    assert call(capfd, "lint", root, "--allow-unknown-key", "rope_parameters.odd").code == 0


def test_no_unknown_key_at_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    done = call(capfd, "lint", write(tmp_path), "--allow-unknown-key", "x")
    done.refused(2, "'x' is no key of the model", "every key is known: leave it out")


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
