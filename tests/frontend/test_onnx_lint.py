"""Lint of ONNX files: operators, initializers and keys, all of them in one report."""

import json
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from sitsc.core.errors import OptionError
from sitsc.core.options import CompileOptions
from sitsc.pipeline import inspect, lint_model
from tests.commands.command_line import call
from tests.frontend.onnx_files import masked_decoder, outside, small_decoder, tensor


def _write(folder: Path, model: Any, **config: Any) -> Path:
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    (folder / "model.onnx.data").write_bytes(bytes(4096))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.onnx"


def test_unsupported_operators_are_a_finding_with_counts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    model = small_decoder()
    for index, op in enumerate(("NonZero", "NonZero", "Det")):
        model.graph.node.append(helper.make_node(op, ["x"], [f"n{index}"]))
    done = call(capfd, "lint", _write(tmp_path, model))
    assert done.code == 1 and done.err == ""
    (error,) = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert "NonZero ×2, Det ×1" in error and "model.onnx" in error


def test_every_initializer_is_consumed_tied_or_left_out_by_a_rule(tmp_path: Path):
    model = outside(masked_decoder())
    model.graph.initializer.append(tensor("idle", 3, 4))
    turned = helper.make_node("Transpose", ["table"], ["other"], perm=[1, 0])
    model.graph.node.insert(0, turned)
    model.graph.node[-2].input[1] = "other"  # the head is the table
    report = lint_model(_write(tmp_path, model))
    assert report.ok, report.findings
    unused = "ignored: no node reads it"
    assert report.tensors == {"tied": 1, "consumed": 1, "constant": 8, unused: 2}
    assert report.left_out == dict.fromkeys(("head", "idle"), "no node reads it")


def test_keys_are_read_or_what_the_graph_says_itself(tmp_path: Path):
    config = {"model_type": "llama", "vocab_size": 8, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    report = lint_model(_write(tmp_path, small_decoder(), **config))
    assert report.ok and report.model_type == "llama"
    uses = {key.key: key.use for key in report.keys}
    assert uses == {k: "consumed" if k in ("model_type", "vocab_size") else "inert" for k in config}
    report = lint_model(_write(tmp_path, small_decoder(), **config | {"vocab_size": 9}))
    (error,) = report.findings
    assert error.level == "error" and "8 logits where vocab_size is 9" in error.what


def test_what_a_compile_would_refuse_is_found(tmp_path: Path):
    model = small_decoder()
    del model.graph.node[2].attribute[:]  # no mask
    report = lint_model(_write(tmp_path, model))
    assert not report.ok and "no mask" in report.findings[0].what


def test_an_encoder_with_an_unknown_input(tmp_path: Path):
    model = small_decoder()
    model.graph.node[0].input[1] = model.graph.input[0].name = "pixel_values"
    model.graph.node[-1].output[0] = model.graph.output[0].name = "last_hidden_state"
    report = lint_model(_write(tmp_path, model))
    assert [f.level for f in report.findings] == ["error"]
    assert "'pixel_values' is not known" in report.findings[0].what


def test_no_key_can_be_let_pass_where_the_graph_says_all(tmp_path: Path):
    path = _write(tmp_path, small_decoder(), odd=1)
    with pytest.raises(OptionError, match="--allow-unknown-key: no key beside an ONNX graph"):
        lint_model(path, ("odd",))
    with pytest.raises(OptionError, match="no key beside an ONNX graph"):
        inspect(path, CompileOptions(allow_unknown_keys=("odd",)))
