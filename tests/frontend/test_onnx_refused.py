"""ONNX files that are damaged, hostile or beyond what is supported: one error, nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from sitsc.core.errors import CheckpointError, OptionError, SitscError, UnsupportedModelError
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.onnx_trace import trace_onnx
from tests.frontend.onnx_files import small_decoder

Change = Callable[[Any], None]


def _write(folder: Path, model: Any) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _import(path: Path) -> Any:
    return trace_onnx(open_checkpoint(path), torch.float32)


def test_the_small_model_is_fine(tmp_path: Path):
    graph = _import(_write(tmp_path, small_decoder())).graph
    assert sum("sitsc.attention" in str(node.target) for node in graph.nodes) == 1


def test_unsupported_operators_are_named_at_once_with_counts(tmp_path: Path):
    model = small_decoder()
    extra = [("Loop", ""), ("Loop", ""), ("NonZero", ""), ("BiasGelu", "com.microsoft")]
    for index, (op, domain) in enumerate(extra):
        model.graph.node.append(helper.make_node(op, ["x"], [f"n{index}"], domain=domain))
    with pytest.raises(UnsupportedModelError) as caught:
        _import(_write(tmp_path, model))
    text = str(caught.value)
    assert "\n" not in text and "hint" not in text
    assert all(part in text for part in ("Loop ×2", "NonZero ×1", "com.microsoft.BiasGelu ×1"))


def _opset(version: int) -> Change:
    def change(model: Any) -> None:
        model.opset_import[0].version = version

    return change


def _external(**keys: str) -> Change:
    def change(model: Any) -> None:
        tensor = model.graph.initializer[0]
        tensor.ClearField("float_data")
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in keys.items():
            entry = tensor.external_data.add()
            entry.key, entry.value = key, value

    return change


def _dims(*sizes: int) -> Change:
    def change(model: Any) -> None:
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(sizes)

    return change


def _not_causal(model: Any) -> None:
    del model.graph.node[2].attribute[:]


def _unknown_attribute(model: Any) -> None:
    model.graph.node[2].attribute.append(helper.make_attribute("softcap", 3.0))


def _cycle(model: Any) -> None:
    model.graph.node[0].input[1] = "logits"


def _twice(model: Any) -> None:
    model.graph.node[1].output[0] = "x"


def _across_tokens(model: Any) -> None:
    node = helper.make_node("ReduceMean", ["y", "one"], ["m"], keepdims=1)
    model.graph.node.insert(4, node)
    model.graph.node.insert(5, helper.make_node("Add", ["y", "m"], ["z"]))
    model.graph.node[6].input[0] = "z"


def _doubling(model: Any) -> None:
    """A shape that doubles forty times: a terabyte of numbers if it were made."""
    model.graph.node.insert(0, helper.make_node("Shape", ["input_ids"], ["s0"]))
    for index in range(40):
        ends = [f"s{index}", f"s{index}"]
        model.graph.node.insert(
            index + 1, helper.make_node("Concat", ends, [f"s{index + 1}"], axis=0)
        )


def _towering(model: Any) -> None:
    model.graph.initializer.append(helper.make_tensor("big", TensorProto.INT64, [], [2**62]))
    model.graph.node.insert(0, helper.make_node("Pow", ["big", "big"], ["p"]))


REFUSED: list[tuple[Change, str]] = [
    (_opset(17), "opset of 18 to 23"),
    (_opset(24), "opset of 18 to 23"),
    (_external(location="../outside.bin"), "not a plain name"),
    (_external(location="/etc/passwd"), "not a plain name"),
    (_external(location="link.bin"), "leaves the model folder"),
    (_external(location="data.bin", offset="8"), "are not in data.bin"),
    (_external(location="data.bin", offset="-8"), "is not a number"),
    (_external(location="data.bin", length="9" * 30), "is not a number"),
    (_external(), "not a plain name"),
    (_dims(8, 5), "values where the shape"),
    (_dims(-8, -4), "impossible shape"),
    (_dims(1 << 40, 1 << 40), "impossible shape"),
    (_not_causal, "no mask"),
    (_unknown_attribute, "softcap is not supported"),
    (_cycle, "before it is made"),
    (_twice, "is made twice"),
    (_across_tokens, "looks across tokens"),
    (_doubling, "no bounds"),
    (_towering, "to the power"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_what_is_wrong_is_one_line(tmp_path: Path, change: Change, message: str):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(4096))
    (folder / "data.bin").write_bytes(bytes(128))
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    model = small_decoder()
    change(model)
    with pytest.raises(SitscError, match=message) as caught:
        _import(_write(folder, model))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_external_data_inside_the_folder_is_read(tmp_path: Path):
    model = small_decoder()
    _external(location="data.bin", offset="64")(model)
    values = torch.arange(32.0).reshape(8, 4)
    (tmp_path / "data.bin").write_bytes(bytes(64) + values.numpy().tobytes())
    checkpoint = open_checkpoint(_write(tmp_path, model))
    assert torch.equal(checkpoint.read("table", (2, 5)), values[2:5])
    assert checkpoint.read("head.T").shape == (8, 4)


def test_a_float32_graph_is_not_narrowed(tmp_path: Path):
    with pytest.raises(OptionError, match="computes in float32"):
        trace_onnx(open_checkpoint(_write(tmp_path, small_decoder())), torch.bfloat16)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 400))
def test_a_truncated_file_is_an_error_or_a_checkpoint(tmp_path: Path, cut: int):
    data = small_decoder().SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data[: min(cut, len(data) - 1)])
    _opens_or_refuses(path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(changes=[(304, 128)])  # a name that is not UTF-8, which protobuf gives as bytes
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6))
def test_changed_bytes_are_an_error_or_a_checkpoint(tmp_path: Path, changes: list[tuple[int, int]]):
    data = bytearray(small_decoder().SerializeToString())
    for place, value in changes:
        data[place % len(data)] = value
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes(data))
    _opens_or_refuses(path)


def _opens_or_refuses(path: Path) -> None:
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    except SitscError as error:
        assert "\n" not in str(error)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rewired_graphs_are_an_error_or_a_graph(tmp_path: Path, data: st.DataObject):
    """Operators, inputs and attributes at random: tracing ends, in a graph or in one error."""
    model = small_decoder()
    ops = ["Add", "Mul", "Concat", "Reshape", "Expand", "Slice", "Shape", "Range", "MatMul", "Pow"]
    names = ["input_ids", "table", "head", "one", "x", "q", "a", "y"]
    node = data.draw(st.sampled_from(list(model.graph.node)))
    node.op_type = data.draw(st.sampled_from([*ops, node.op_type]))
    count = data.draw(st.integers(1, 4))
    del node.input[:]
    node.input.extend(data.draw(st.lists(st.sampled_from(names), min_size=count, max_size=count)))
    try:
        _import(_write(tmp_path, model))
    except SitscError as error:
        assert "\n" not in str(error)


def test_the_file_is_checked_as_onnx_itself_does(tmp_path: Path):
    onnx.checker.check_model(small_decoder())
    with pytest.raises(CheckpointError, match="not an ONNX file"):
        open_checkpoint(_write_bytes(tmp_path, b"\xff" * 40))


def _write_bytes(folder: Path, data: bytes) -> Path:
    (folder / "model.onnx").write_bytes(data)
    return folder / "model.onnx"
