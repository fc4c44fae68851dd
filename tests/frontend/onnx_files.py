"""Small ONNX decoders written by hand, from which tests and fuzzers start."""

from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from sitsc.export.moe_form import MoeForm
from sitsc.export.onnx_expert_ops import moe_function


def tensor(name: str, *shape: int, kind: int = TensorProto.FLOAT) -> Any:
    """A constant tensor record."""
    count = int(torch.Size(shape).numel())
    return helper.make_tensor(name, kind, shape, [0.5 if kind == 1 else 1] * count)


def _made(nodes: list[Any], tensors: list[Any]) -> Any:
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "tokens"])
    out = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "tokens", 8])
    graph = helper.make_graph(nodes, "g", [ids], [out], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])


def small_decoder() -> Any:
    """An embedding, one causal attention over it, and a head: 8 tokens, width 4."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"], name="embed"),
        helper.make_node("Unsqueeze", ["x", "one"], ["q"]),
        helper.make_node("Attention", ["q", "q", "q"], ["a"], is_causal=1),
        helper.make_node("Squeeze", ["a", "one"], ["y"]),
        helper.make_node("MatMul", ["y", "head"], ["logits"]),
    ]
    one = helper.make_tensor("one", TensorProto.INT64, [1], [1])
    return _made(nodes, [tensor("table", 8, 4), tensor("head", 4, 8), one])


def masked_decoder() -> Any:
    """The same with a norm, softmax between two products, and a mask made of a Range."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["e"]),
        helper.make_node("RMSNormalization", ["e", "gain"], ["x"], epsilon=1e-5),
        helper.make_node("Shape", ["input_ids"], ["count"], start=1, end=2),
        helper.make_node("Squeeze", ["count", "zero"], ["n"]),
        helper.make_node("Range", ["nil", "n", "step"], ["places"]),
        helper.make_node("Unsqueeze", ["places", "one"], ["rows"]),
        helper.make_node("LessOrEqual", ["places", "rows"], ["seen"]),
        helper.make_node("Unsqueeze", ["x", "one"], ["q"]),
        helper.make_node("Transpose", ["q"], ["k"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "k"], ["raw"]),
        helper.make_node("Mul", ["raw", "half"], ["scores"]),
        helper.make_node("Where", ["seen", "scores", "low"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["share"], axis=-1),
        helper.make_node("MatMul", ["share", "q"], ["a"]),
        helper.make_node("Squeeze", ["a", "one"], ["y"]),
        helper.make_node("Gemm", ["flat", "head"], ["rows8"]),
        helper.make_node("Reshape", ["rows8", "whole"], ["logits"]),
    ]
    nodes.insert(15, helper.make_node("Reshape", ["y", "rows4"], ["flat"]))
    integers = {"one": [1], "zero": [0], "rows4": [-1, 4], "whole": [1, -1, 8]}
    tensors = [tensor("table", 8, 4), tensor("head", 4, 8), tensor("gain", 4)]
    tensors += [numpy_helper.from_array(np.array(v), n) for n, v in integers.items()]
    scalars = {"nil": np.int64(0), "step": np.int64(1), "half": np.float32(0.5)}
    scalars["low"] = np.float32(-1e9)
    tensors += [numpy_helper.from_array(np.array(v), n) for n, v in scalars.items()]
    return _made(nodes, tensors)


def with_function() -> Any:
    """The small decoder with a function of our exporter that nothing calls."""
    form = MoeForm(
        ("x", "logits", "gate_up", "down"), 4, 2, "softmax", 1, 1, 1, 1.0, "silu", 0.0, 0.0
    )
    model = small_decoder()
    model.functions.append(moe_function(form, "Moe_1"))
    model.opset_import.append(helper.make_opsetid("sitsc", 1))
    return model


def outside(model: Any) -> Any:
    """A model whose first initializer lies in model.onnx.data."""
    first = model.graph.initializer[0]
    first.ClearField("float_data")
    first.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "model.onnx.data"), ("offset", "64")):
        entry = first.external_data.add()
        entry.key, entry.value = key, value
    return model
