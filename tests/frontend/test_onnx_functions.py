"""Functions in ONNX files: ours are known to the byte, any other is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from sitsc.core.errors import UnsupportedModelError
from sitsc.export.moe_form import MoeForm
from sitsc.export.onnx_expert_ops import moe_function
from sitsc.frontend.checkpoint import open_checkpoint
from tests.frontend.onnx_files import small_decoder

FORM = MoeForm(
    inputs=("x", "logits", "gate_up", "down"),
    experts=4,
    top_k=2,
    scoring="softmax",
    groups=1,
    group_top=1,
    normalise=1,
    scaling=1.0,
    activation="silu",
    alpha=0.0,
    limit=0.0,
)


def _write(folder: Path, function: Any) -> Path:
    model = small_decoder()
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("sitsc", 1))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def test_our_function_is_read(tmp_path: Path):
    program: Any = open_checkpoint(_write(tmp_path, moe_function(FORM, "Moe_1"))).program
    assert program.file.functions == {"Moe_1": FORM}


def _another_body(function: Any) -> None:
    function.node[0].op_type = "LogSoftmax"


def _another_description(function: Any) -> None:
    function.doc_string = function.doc_string.replace('"top_k": 2', '"top_k": 3')


def _no_description(function: Any) -> None:
    function.doc_string = ""


def _deep(function: Any) -> None:
    function.doc_string = "[" * 100_000


def _wild(function: Any) -> None:
    function.doc_string = function.doc_string.replace('"experts": 4', '"experts": 1e9')


def _other_types(function: Any) -> None:
    function.doc_string = function.doc_string.replace('"scaling": 1.0', '"scaling": "x"')


def _unhashable(function: Any) -> None:
    function.doc_string = function.doc_string.replace('"scoring": "softmax"', '"scoring": []')


def _another_domain(function: Any) -> None:
    function.domain = "other"


CHANGES = [_another_body, _another_description, _no_description, _deep, _wild, _other_types]
CHANGES += [_unhashable, _another_domain]


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_is_refused(change: Callable[[Any], None], tmp_path: Path):
    function = moe_function(FORM, "Moe_1")
    change(function)
    with pytest.raises(UnsupportedModelError, match="functions of its own: 'Moe_1'") as caught:
        open_checkpoint(_write(tmp_path, function))
    assert "\n" not in str(caught.value)
