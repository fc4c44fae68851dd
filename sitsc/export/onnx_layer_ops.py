"""Operators of ours that work on rows, as plain ONNX nodes: linear layers, norms, rope, GLU.

The same form as in `onnx_shape_ops`; packed weights come as `Stored`. Half precision is computed in
float32 throughout: nothing is rounded in between.
"""

import torch

from sitsc.export.onnx_builder import Builder
from sitsc.export.onnx_math_ops import ACTIVATIONS
from sitsc.export.onnx_shape_ops import Arguments, Operator, same
from sitsc.export.onnx_stored import Stored, matrix, plain
from sitsc.export.onnx_values import UnwrittenError, Value


def name_of(b: Builder, value: Value | Stored) -> str:
    """A value, or a weight that is stored plainly, by name."""
    return plain(b, value) if isinstance(value, Stored) else value.name


def rms_norm(b: Builder, x: str, weight: str | None, eps: float, offset: float) -> str:
    """x / rms(x), times (offset + weight)."""
    mean = b.node("ReduceMean", b.node("Pow", x, b.real(2.0)), b.constant([-1]), keepdims=1)
    factor = b.node("Reciprocal", b.node("Sqrt", b.node("Add", mean, b.real(eps))))
    normed = b.node("Mul", x, factor)
    if weight is None:
        return normed
    if offset:
        wide = weight
        weight = b.once(("offset", wide, offset), lambda: b.node("Add", wide, b.real(offset)))
        return b.node("Mul", normed, weight)
    return b.node("Mul", weight, normed)


def _rms_norm(b: Builder, a: Arguments) -> str:
    weight = None if a["weight"] is None else name_of(b, a["weight"])
    return rms_norm(b, a["x"].name, weight, a["eps"], a["offset"])


def _layer_norm(b: Builder, a: Arguments) -> str:
    """LayerNormalization; by hand where the weight is one of each head or is left out."""
    x, weight, bias = a["x"].name, a["weight"], a["bias"]
    metas = weight.metas[0] if isinstance(weight, Value) else None
    rank = (
        len(weight.spec.shape)
        if isinstance(weight, Stored)
        else metas.dim()
        if metas is not None
        else 0
    )
    if rank == 1:
        inputs = [x, name_of(b, weight)] + ([] if bias is None else [name_of(b, bias)])
        return b.node("LayerNormalization", *inputs, axis=-1, epsilon=float(a["eps"]))
    axes = b.constant([-1])
    centred = b.node("Sub", x, b.node("ReduceMean", x, axes, keepdims=1))
    spread = b.node("ReduceMean", b.node("Pow", centred, b.real(2.0)), axes, keepdims=1)
    root = b.node("Reciprocal", b.node("Sqrt", b.node("Add", spread, b.real(a["eps"]))))
    made = b.node("Mul", centred, root)
    made = made if weight is None else b.node("Mul", name_of(b, weight), made)
    return made if bias is None else b.node("Add", made, name_of(b, bias))


def fused_linear(b: Builder, a: Arguments) -> str:
    """A norm before, the product, a bias, and what comes after."""
    x, columns, out = a["x"].name, a["x"].shape[-1], a["out_features"]
    if a["prologue"] == "rms_norm":
        weight = None if a["norm_weight"] is None else name_of(b, a["norm_weight"])
        x = rms_norm(b, x, weight, a["eps"], a["offset"])
    rows = out * (2 if a["epilogue"] == "glu" else 1)
    y = b.node("MatMul", x, matrix(b, a["weight"], a["scale"], rows, columns, turned=True))
    if a["bias"] is not None:
        y = b.node("Add", y, name_of(b, a["bias"]))
    if a["epilogue"] == "residual":
        return b.node("Add", a["residual"].name, y)
    if a["epilogue"] == "activation":
        return ACTIVATIONS[a["activation"]](b, y)
    if a["epilogue"] == "glu":
        gate, up = b.nodes_of("Split", (y, b.constant([out, out])), 2, axis=-1)
        return b.node("Mul", ACTIVATIONS[a["activation"]](b, gate), up)
    if a["epilogue"] != "none":
        raise UnwrittenError(f"with epilogue {a['epilogue']}")
    return y


def packed_embedding(b: Builder, a: Arguments) -> str:
    """Rows of a table."""
    table = matrix(b, a["weight"], a["scale"], a["rows"], a["hidden"], turned=False)
    return b.node("Gather", table, a["ids"].name, axis=0)


def glu(b: Builder, a: Arguments) -> str:
    """activation(gate) · up."""
    return b.node("Mul", ACTIVATIONS[a["activation"]](b, a["gate"].name), a["up"].name)


def rotate(b: Builder, x: str, cos: str, sin: str, widths: tuple[int, int], style: str) -> str:
    """Rotary embedding of x [..., head_dim] by tables of `widths[1]` of `widths[0]` dimensions."""
    whole, width = widths
    rest = ""
    if width < whole:
        x, rest = b.nodes_of("Split", (x, b.constant([width, whole - width])), 2, axis=-1)
    if style == "half":
        low, high = b.slice(x, -1, 0, width // 2), b.slice(x, -1, width // 2, 2**62)
        turned = b.node("Concat", b.node("Neg", high), low, axis=-1)
    else:
        even, odd = b.slice(x, -1, 0, 2**62, 2), b.slice(x, -1, 1, 2**62, 2)
        pair = (b.unsqueeze(b.node("Neg", odd), -1), b.unsqueeze(even, -1))
        joined = b.node("Concat", *pair, axis=-1)
        turned = b.node("Reshape", joined, b.node("Shape", x))
    out = b.node("Add", b.node("Mul", x, cos), b.node("Mul", turned, sin))
    return b.node("Concat", out, rest, axis=-1) if rest else out


def rope(b: Builder, a: Arguments) -> str:
    """Rotary embedding of x [1, heads, tokens, head_dim]."""
    widths = (a["x"].shape[-1], a["cos"].shape[-1])
    return rotate(b, a["x"].name, a["cos"].name, a["sin"].name, widths, a["style"])


def rope_table(b: Builder, a: Arguments) -> str:
    """Cosines and sines of the positions [2, tokens, rotary_dim]."""
    places = b.unsqueeze(b.operand(a["position_ids"], torch.float32), 1)
    angles = b.node("Mul", places, name_of(b, a["inv_freq"]))
    angles = b.node("Concat", angles, angles, axis=-1)
    tables = [b.unsqueeze(b.node(op, angles), 0) for op in ("Cos", "Sin")]
    made = b.node("Concat", *tables, axis=0)
    return made if a["scaling"] == 1 else b.node("Mul", made, b.real(a["scaling"]))


LAYER_OPS: dict[str, Operator] = {
    "fused_linear.default": fused_linear,
    "packed_embedding.default": packed_embedding,
    "rms_norm.default": _rms_norm,
    "layer_norm.default": _layer_norm,
    "glu.default": glu,
    "rope.default": rope,
    "rope_table.default": rope_table,
    "keep.default": same,
}
