"""ATen operators of convolutional networks as ONNX nodes, in the form of `onnx_shape_ops`."""

from typing import Any

from sitsc.export.onnx_builder import Builder
from sitsc.export.onnx_shape_ops import Arguments, Operator
from sitsc.export.onnx_values import UnwrittenError, Value


def _wide(value: Any, count: int) -> list[int]:
    """One number for each dimension."""
    items = [value] if isinstance(value, int) else list(value)
    return items * count if len(items) == 1 else items


def convolution(b: Builder, a: Arguments) -> str:
    """Conv, and ConvTranspose where it is turned round."""
    value: Value = a["input"]
    count = value.rank - 2
    if value.rank < 3:
        raise UnwrittenError("without a batch")
    inputs = [value.name, a["weight"].name]
    inputs += [] if a["bias"] is None else [a["bias"].name]
    pads = _wide(a["padding"], count)
    given: dict[str, Any] = {
        "strides": _wide(a["stride"], count),
        "pads": [*pads, *pads],
        "dilations": _wide(a["dilation"], count),
        "group": a["groups"],
    }
    if a.get("transposed", "output_padding" in a):
        more = _wide(a["output_padding"], count)
        return b.node("ConvTranspose", *inputs, output_padding=more, **given)
    return b.node("Conv", *inputs, **given)


def batch_norm(b: Builder, a: Arguments) -> str:
    """Batch norm of inference."""
    if a.get("training"):
        raise UnwrittenError("of training")
    value: Value = a["input"]
    width = b.sizes([b.size(value, 1)])
    given = {"weight": 1.0, "bias": 0.0}
    names = [
        b.node("Expand", b.real(number), width) if a[key] is None else a[key].name
        for key, number in given.items()
    ]
    names += [a["running_mean"].name, a["running_var"].name]
    return b.node("BatchNormalization", value.name, *names, epsilon=float(a["eps"]))


def group_norm(b: Builder, a: Arguments) -> str:
    """Norm over groups of channels."""
    value: Value = a["input"]
    groups, shape = a["num_groups"], b.node("Shape", value.name)
    flat = b.reshape(value.name, [0, groups, -1])
    ones, zeros = (b.node("Expand", b.real(n), b.sizes([groups])) for n in (1.0, 0.0))
    normed = b.node("InstanceNormalization", flat, ones, zeros, epsilon=float(a["eps"]))
    made = b.node("Reshape", normed, shape)
    for op, key in (("Mul", "weight"), ("Add", "bias")):
        if a[key] is not None:
            made = b.node(op, made, b.reshape(a[key].name, [1, -1] + [1] * (value.rank - 2)))
    return made


def _pooled(b: Builder, a: Arguments, op: str, **more: Any) -> str:
    value: Value = a["self"]
    size = _wide(a["kernel_size"], 2)
    pads = _wide(a["padding"], 2)
    return b.node(
        op,
        value.name,
        kernel_shape=size,
        strides=_wide(a["stride"], 2) if a["stride"] else size,
        pads=[*pads, *pads],
        ceil_mode=int(a["ceil_mode"]),
        **more,
    )


def max_pool(b: Builder, a: Arguments) -> str:
    """max_pool2d."""
    return _pooled(b, a, "MaxPool", dilations=_wide(a["dilation"], 2))


def average_pool(b: Builder, a: Arguments) -> str:
    """avg_pool2d."""
    if a["divisor_override"] is not None or a["ceil_mode"]:
        raise UnwrittenError("with a divisor or ceil_mode")
    return _pooled(b, a, "AveragePool", count_include_pad=int(a["count_include_pad"]))


def adaptive_pool(b: Builder, a: Arguments) -> str:
    """adaptive_avg_pool2d to one value."""
    if list(a["output_size"]) != [1, 1]:
        raise UnwrittenError("to more than one value")
    return b.node("GlobalAveragePool", a["self"].name)


PICTURE_OPS: dict[str, Operator] = {
    **dict.fromkeys(("conv1d.default", "conv2d.default", "conv3d.default"), convolution),
    **dict.fromkeys(("conv_transpose1d.default", "conv_transpose2d.input"), convolution),
    "convolution.default": convolution,
    "batch_norm.default": batch_norm,
    "_native_batch_norm_legit_no_training.default": lambda b, a: [batch_norm(b, a), "", ""],
    "group_norm.default": group_norm,
    "max_pool2d.default": max_pool,
    "avg_pool2d.default": average_pool,
    "adaptive_avg_pool2d.default": adaptive_pool,
}
