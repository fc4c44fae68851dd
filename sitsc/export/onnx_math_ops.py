"""ATen operators that compute: elementwise, comparisons, reductions, products, norms, attention.

The same form as in `onnx_shape_ops`. Types follow torch's promotion, half precision as float32.
"""

import math
from typing import Any

import torch

from sitsc.export.onnx_builder import INT64, Builder
from sitsc.export.onnx_shape_ops import Arguments, Operator
from sitsc.export.onnx_values import Size, UnwrittenError, Value, computed

FLOAT = torch.float32
LOW = -3e38  # of hidden keys: finite, so that a row without any key is no NaN


def _example(value: Any) -> Any:
    if isinstance(value, Value):
        return value.metas[0]
    return value.examples[0] if isinstance(value, Size) else value


def promoted(*values: Any) -> torch.dtype:
    """The type that torch computes operands in."""
    first, *rest = (_example(v) for v in values)
    dtype = torch.result_type(first, rest[0]) if rest else first.dtype
    return computed(dtype)


def binary(op: str, *, real: bool = False) -> Operator:
    """An elementwise operator of two values; `real`: integers become floating first."""

    def write(b: Builder, a: Arguments) -> str:
        x, y = a["self"], a.get("other", a.get("exponent"))
        dtype = promoted(x, y)
        if real and not dtype.is_floating_point:
            dtype = FLOAT
        if dtype == torch.bool and op in ("Add", "Mul"):
            return b.node("Or" if op == "Add" else "And", x.name, b.operand(y, dtype))
        second = b.operand(y, dtype)
        if a.get("alpha", 1) != 1:
            second = b.node("Mul", second, b.operand(a["alpha"], dtype))
        return b.node(op, b.operand(x, dtype), second)

    return write


def reversed_sub(b: Builder, a: Arguments) -> str:
    """rsub: other − alpha · self."""
    return binary("Sub")(b, a | {"self": a["other"], "other": a["self"]})


def divide(b: Builder, a: Arguments) -> str:
    """div with a rounding mode."""
    mode = a.get("rounding_mode")
    if mode is None:
        return binary("Div", real=True)(b, a)
    integer = not promoted(a["self"], a["other"]).is_floating_point
    if mode == "floor" and not integer:
        return b.node("Floor", binary("Div")(b, a))
    raise UnwrittenError(f"rounded by {mode}")


def compare(op: str) -> Operator:
    """A comparison, in the common type."""

    def write(b: Builder, a: Arguments) -> str:
        x, y = a["self"], a["other"]
        dtype = promoted(x, y)
        if dtype == torch.bool and op != "Equal":
            dtype = torch.int32
        return b.node(op, b.operand(x, dtype), b.operand(y, dtype))

    return write


def differ(b: Builder, a: Arguments) -> str:
    """ne."""
    return b.node("Not", compare("Equal")(b, a))


def logic(op: str) -> Operator:
    """And, Or, Xor of truth values, or of the bits of integers."""

    def write(b: Builder, a: Arguments) -> str:
        x, y = a["self"], a["other"]
        dtype = promoted(x, y)
        name = op if dtype == torch.bool else f"Bitwise{op}"
        return b.node(name, b.operand(x, dtype), b.operand(y, dtype))

    return write


def logical(op: str) -> Operator:
    """logical_and and its like: of anything that is not zero."""

    def write(b: Builder, a: Arguments) -> str:
        return b.node(op, *(b.operand(a[key], torch.bool) for key in ("self", "other")))

    return write


def unary(op: str, *, real: bool = False) -> Operator:
    """An elementwise operator of one value."""

    def write(b: Builder, a: Arguments) -> str:
        value = a["self"]
        return b.node(op, b.operand(value, FLOAT) if real else value.name)

    return write


def negated(b: Builder, a: Arguments) -> str:
    """logical_not."""
    return b.node("Not", b.operand(a["self"], torch.bool))


def bits_negated(b: Builder, a: Arguments) -> str:
    """bitwise_not."""
    return b.node("Not" if a["self"].dtype == torch.bool else "BitwiseNot", a["self"].name)


def rsqrt(b: Builder, a: Arguments) -> str:
    """1 / sqrt(x)."""
    return b.node("Reciprocal", b.node("Sqrt", b.operand(a["self"], FLOAT)))


def power(b: Builder, a: Arguments) -> str:
    """pow of a tensor."""
    dtype = promoted(a["self"], a["exponent"])
    return b.node("Pow", b.operand(a["self"], dtype), b.operand(a["exponent"], dtype))


def silu(b: Builder, x: str) -> str:
    """x · sigmoid(x)."""
    return b.node("Mul", x, b.node("Sigmoid", x))


def gelu_erf(b: Builder, x: str) -> str:
    """x · (1 + erf(x / √2)) / 2."""
    turned = b.node("Erf", b.node("Div", x, b.real(math.sqrt(2.0))))
    wide = b.node("Mul", x, b.node("Add", turned, b.real(1.0)))
    return b.node("Mul", wide, b.real(0.5))


def gelu_tanh(b: Builder, x: str) -> str:
    """x · (1 + tanh(√(2/π) · (x + 0.044715 x³))) / 2."""
    cubed = b.node("Mul", b.node("Pow", x, b.real(3.0)), b.real(0.044715))
    inner = b.node("Mul", b.node("Add", x, cubed), b.real(math.sqrt(2.0 / math.pi)))
    half = b.node("Mul", x, b.real(0.5))
    return b.node("Mul", half, b.node("Add", b.node("Tanh", inner), b.real(1.0)))


def relu_squared(b: Builder, x: str) -> str:
    """relu(x)²."""
    kept = b.node("Relu", x)
    return b.node("Mul", kept, kept)


ACTIVATIONS = {
    "silu": silu,
    "gelu_erf": gelu_erf,
    "gelu_tanh": gelu_tanh,
    "relu": lambda b, x: b.node("Relu", x),
    "relu2": relu_squared,
}


def gelu(b: Builder, a: Arguments) -> str:
    """gelu by its approximation."""
    return (gelu_tanh if a["approximate"] == "tanh" else gelu_erf)(b, a["self"].name)


def softplus(b: Builder, a: Arguments) -> str:
    """softplus as torch has it by default."""
    if (a["beta"], a["threshold"]) != (1, 20):
        raise UnwrittenError("with another beta or threshold")
    return b.node("Softplus", a["self"].name)


def clamp(b: Builder, a: Arguments) -> str:
    """clamp, clamp_min, clamp_max by numbers or tensors."""
    value = a["self"]
    name = value.name
    for key, op in (("min", "Max"), ("max", "Min")):
        if a.get(key) is not None:
            name = b.node(op, name, b.operand(a[key], value.dtype))
    return name


def reduce(op: str) -> Operator:
    """A reduction over dimensions, or over all."""

    def write(b: Builder, a: Arguments) -> str:
        value, dims = a["self"], a.get("dim")
        dims = [dims] if isinstance(dims, int) else list(dims or [])
        axes = [d % value.rank for d in dims] or list(range(value.rank))
        dtype = a.get("dtype") or value.metas[0].dtype
        if op == "ReduceSum" and not dtype.is_floating_point:
            dtype = INT64
        source = b.operand(value, computed(dtype))
        return b.node(op, source, b.constant(axes), keepdims=int(a.get("keepdim", False)))

    return write


def truth(op: str) -> Operator:
    """any and all."""

    def write(b: Builder, a: Arguments) -> str:
        number = b.cast(a["self"].name, torch.int32)
        value, dims = a["self"], a.get("dim")
        axes = list(range(value.rank)) if dims is None else [dims % value.rank]
        made = b.node(op, number, b.constant(axes), keepdims=int(a.get("keepdim", False)))
        return b.cast(made, torch.bool)

    return write


def vector_norm(b: Builder, a: Arguments) -> str:
    """The norm of order 1 or 2."""
    if a["ord"] not in (1, 2):
        raise UnwrittenError(f"of order {a['ord']}")
    return reduce(f"ReduceL{int(a['ord'])}")(b, a)


def variance(b: Builder, a: Arguments) -> str:
    """var with a correction (or `unbiased`, which is one of 1)."""
    value, dims = a["self"], a["dim"]
    dims = [dims] if isinstance(dims, int) else list(dims or range(value.rank))
    axes = [d % value.rank for d in dims]
    sizes = [value.shape[d] for d in axes]
    count = math.prod(size for size in sizes if size is not None)
    correction = a["correction"] if "correction" in a else int(a["unbiased"])
    if None in sizes:
        raise UnwrittenError("over a free size")
    over = b.constant(axes)
    centred = b.node("Sub", value.name, b.node("ReduceMean", value.name, over, keepdims=1))
    total = b.node("ReduceSumSquare", centred, over, keepdims=int(a["keepdim"]))
    whole = count - (1 if correction is None else correction)
    return b.node("Div", total, b.real(float(max(0, whole))))


def deviation(b: Builder, a: Arguments) -> str:
    """std."""
    return b.node("Sqrt", variance(b, a))


def extreme(op: str) -> Operator:
    """max.dim and min.dim: values and indices."""

    def write(b: Builder, a: Arguments) -> list[str]:
        value, keep = a["self"], int(a["keepdim"])
        axis = a["dim"] % value.rank
        best = b.node(f"Reduce{op}", value.name, b.constant([axis]), keepdims=keep)
        return [best, b.node(f"Arg{op}", value.name, axis=axis, keepdims=keep)]

    return write


def argument_of(op: str) -> Operator:
    """argmax and argmin along a dimension."""

    def write(b: Builder, a: Arguments) -> str:
        if a["dim"] is None:
            flat = b.reshape(a["self"].name, [-1])
            return b.node(op, flat, axis=0, keepdims=0)
        axis = a["dim"] % a["self"].rank
        return b.node(op, a["self"].name, axis=axis, keepdims=int(a["keepdim"]))

    return write


def top(b: Builder, a: Arguments) -> list[str]:
    """topk: values and indices."""
    count = b.sizes([a["k"]])
    axis = a["dim"] % a["self"].rank
    return b.nodes_of(
        "TopK", (a["self"].name, count), 2, axis=axis, largest=int(a["largest"]), sorted=1
    )


def softmax(op: str) -> Operator:
    """Softmax and LogSoftmax."""

    def write(b: Builder, a: Arguments) -> str:
        dtype = computed(a.get("dtype") or a["self"].metas[0].dtype)
        return b.node(op, b.operand(a["self"], dtype), axis=a["dim"] % a["self"].rank)

    return write


def matmul(b: Builder, a: Arguments) -> str:
    """mm, bmm, matmul."""
    other = a["mat2"] if "mat2" in a else a["other"]
    return b.node("MatMul", a["self"].name, other.name)


def linear(b: Builder, a: Arguments) -> str:
    """A product with a transposed matrix, plus a bias."""
    made = b.node("MatMul", a["input"].name, b.transpose(a["weight"].name, [1, 0]))
    return made if a["bias"] is None else b.node("Add", made, a["bias"].name)


def addmm(b: Builder, a: Arguments) -> str:
    """beta · self + alpha · mat1 @ mat2."""
    product = b.node("MatMul", a["mat1"].name, a["mat2"].name)
    if a["alpha"] != 1:
        product = b.node("Mul", product, b.real(float(a["alpha"])))
    other = a["self"].name
    if a["beta"] != 1:
        other = b.node("Mul", other, b.real(float(a["beta"])))
    return b.node("Add", product, other)


def layer_norm(b: Builder, a: Arguments) -> str:
    """layer_norm over the last dimensions."""
    value, count = a["input"], len(a["normalized_shape"])
    weight = a["weight"]
    ones = list(a["normalized_shape"])
    scale = b.node("Expand", b.real(1.0), b.sizes(ones)) if weight is None else weight.name
    inputs = [value.name, scale] + ([] if a["bias"] is None else [a["bias"].name])
    return b.node("LayerNormalization", *inputs, axis=-count, epsilon=float(a["eps"]))


def native_layer_norm(b: Builder, a: Arguments) -> list[str]:
    """layer_norm with what only training reads."""
    return [layer_norm(b, a), "", ""]


def attention(b: Builder, a: Arguments) -> str:
    """scaled_dot_product_attention of inference."""
    q, k, v, mask = a["query"], a["key"], a["value"], a["attn_mask"]
    width = q.shape[-1]
    if width is None or (a["is_causal"] and mask is not None) or a["dropout_p"]:
        raise UnwrittenError("of a free head size, or with a mask and is_causal")
    if a["enable_gqa"] and q.shape[-3] != k.shape[-3]:
        raise UnwrittenError("with enable_gqa")
    scale = width**-0.5 if a["scale"] is None else a["scale"]
    order = [*range(k.rank - 2), k.rank - 1, k.rank - 2]
    scores = b.node("MatMul", q.name, b.transpose(k.name, order))
    scores = b.node("Mul", scores, b.real(scale))
    if a["is_causal"]:
        row, column = (
            b.node("Range", b.constant(0), b.operand(b.size(t, -2), INT64), b.constant(1))
            for t in (q, k)
        )
        seen = b.node("LessOrEqual", column, b.unsqueeze(row, 1))
        scores = b.node("Where", seen, scores, b.real(LOW))
    elif mask is not None and mask.dtype == torch.bool:
        scores = b.node("Where", mask.name, scores, b.real(LOW))
    elif mask is not None:
        scores = b.node("Add", scores, mask.name)
    return b.node("MatMul", b.node("Softmax", scores, axis=-1), v.name)


_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "maximum": "Max", "minimum": "Min"}
_COMPARED = {"eq": "Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater"}
_COMPARED |= {"ge": "GreaterOrEqual"}
_REAL = ("exp", "log", "sqrt", "reciprocal", "cos", "sin", "tan", "tanh", "sigmoid", "erf")
_KEEPING = {"neg": "Neg", "abs": "Abs", "relu": "Relu", "floor": "Floor", "ceil": "Ceil"}
_KEEPING |= {"round": "Round", "sign": "Sign", "isnan": "IsNaN", "isinf": "IsInf"}

MATH_OPS: dict[str, Operator] = {
    **{
        f"{name}.{kind}": binary(op)
        for name, op in _BINARY.items()
        for kind in ("Tensor", "Scalar")
    },
    "maximum.default": binary("Max"),
    "minimum.default": binary("Min"),
    **dict.fromkeys(("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode"), divide),
    **dict.fromkeys(("rsub.Scalar", "rsub.Tensor"), reversed_sub),
    **dict.fromkeys(("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"), power),
    **{f"{n}.{k}": compare(op) for n, op in _COMPARED.items() for k in ("Tensor", "Scalar")},
    **dict.fromkeys(("ne.Tensor", "ne.Scalar"), differ),
    **{f"{n}.{k}": logic("And") for n in ("__and__", "bitwise_and") for k in ("Tensor", "Scalar")},
    **{f"{n}.{k}": logic("Or") for n in ("__or__", "bitwise_or") for k in ("Tensor", "Scalar")},
    **{f"{n}.{k}": logic("Xor") for n in ("__xor__", "bitwise_xor") for k in ("Tensor", "Scalar")},
    "logical_and.default": logical("And"),
    "logical_or.default": logical("Or"),
    "logical_xor.default": logical("Xor"),
    "logical_not.default": negated,
    "bitwise_not.default": bits_negated,
    **{f"{name}.default": unary(name.capitalize(), real=True) for name in _REAL},
    **{f"{name}.default": unary(op) for name, op in _KEEPING.items()},
    "rsqrt.default": rsqrt,
    "silu.default": lambda b, a: silu(b, a["self"].name),
    "gelu.default": gelu,
    "softplus.default": softplus,
    "leaky_relu.default": lambda b, a: b.node(
        "LeakyRelu", a["self"].name, alpha=float(a["negative_slope"])
    ),
    **dict.fromkeys(("clamp.default", "clamp.Tensor", "clamp_min.default"), clamp),
    "clamp_max.default": clamp,
    "hardtanh.default": lambda b, a: clamp(b, a | {"min": a["min_val"], "max": a["max_val"]}),
    **dict.fromkeys(("sum.default", "sum.dim_IntList"), reduce("ReduceSum")),
    **dict.fromkeys(("mean.default", "mean.dim"), reduce("ReduceMean")),
    **dict.fromkeys(("amax.default", "max.default"), reduce("ReduceMax")),
    **dict.fromkeys(("amin.default", "min.default"), reduce("ReduceMin")),
    **dict.fromkeys(("any.default", "any.dim"), truth("ReduceMax")),
    **dict.fromkeys(("all.default", "all.dim"), truth("ReduceMin")),
    "linalg_vector_norm.default": vector_norm,
    **dict.fromkeys(("var.correction", "var.dim"), variance),
    **dict.fromkeys(("std.correction", "std.dim"), deviation),
    "max.dim": extreme("Max"),
    "min.dim": extreme("Min"),
    "argmax.default": argument_of("ArgMax"),
    "argmin.default": argument_of("ArgMin"),
    "topk.default": top,
    **dict.fromkeys(("softmax.int", "_softmax.default"), softmax("Softmax")),
    **dict.fromkeys(("log_softmax.int", "_log_softmax.default"), softmax("LogSoftmax")),
    **dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), matmul),
    "linear.default": linear,
    "addmm.default": addmm,
    "layer_norm.default": layer_norm,
    "native_layer_norm.default": native_layer_norm,
    "scaled_dot_product_attention.default": attention,
}
