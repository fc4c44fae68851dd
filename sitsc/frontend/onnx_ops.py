"""ONNX operators that compute: elementwise, reductions, products, norms, attention.

Each takes a `Call` and gives the value of its output, or a tuple of values.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.export.moe_form import MoeForm
from sitsc.frontend.onnx_call import Call
from sitsc.frontend.onnx_host import BINARY, UNARY, as_list, as_tensor, choose, each, is_host
from sitsc.frontend.onnx_shape_ops import SHAPE_OPS


def _operand(value: Any, beside: Any) -> Any:
    """A host value as an operand beside a tensor: numbers stay numbers."""
    if not is_host(value) or not isinstance(value, list):
        return value
    one = len(value) == 1 and isinstance(beside, Tensor) and beside.dim() > 0
    return value[0] if one else as_tensor(value)


def _quotient(x: Any, y: Any) -> Any:
    first = x if isinstance(x, Tensor) else y
    if first.is_floating_point():
        return x / y
    return torch.div(as_tensor(x), y, rounding_mode="trunc")


def _larger(x: Any, y: Any) -> Any:
    x, y = (v if isinstance(v, Tensor) else as_tensor(v) for v in (x, y))
    return torch.maximum(x, y)


def _smaller(x: Any, y: Any) -> Any:
    x, y = (v if isinstance(v, Tensor) else as_tensor(v) for v in (x, y))
    return torch.minimum(x, y)


_TENSOR_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    **BINARY,
    "Div": _quotient,
    "Pow": lambda x, y: x**y,
    "And": lambda x, y: torch.logical_and(as_tensor(x), as_tensor(y)),
    "Or": lambda x, y: torch.logical_or(as_tensor(x), as_tensor(y)),
    "Max": _larger,
    "Min": _smaller,
}


def binary(call: Call) -> Any:
    """An elementwise operator of two values (or more, of Max and Min)."""
    if call.op == "Mod":
        call.require(not call.get("fmod", 0), "fmod")
    call.require(len(call.inputs) >= 1, "no operand")
    result = call.value(0)
    for index in range(1, len(call.inputs)):
        result = _two(call.op, result, call.value(index))
    return result


def _two(op: str, x: Any, y: Any) -> Any:
    if is_host(x) and is_host(y):
        return each(BINARY[op], x, y)
    x, y = _operand(x, y), _operand(y, x)
    return _TENSOR_BINARY[op](x, y)


_TENSOR_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Sqrt": torch.sqrt,
    "Neg": torch.neg,
    "Abs": torch.abs,
    "Not": torch.logical_not,
    "Identity": lambda x: x,
    "Reciprocal": torch.reciprocal,
    "Floor": torch.floor,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Sin": torch.sin,
    "Exp": torch.exp,
    "Log": torch.log,
    "Erf": torch.erf,
    "Tanh": torch.tanh,
    "Sigmoid": torch.sigmoid,
    "Relu": torch.relu,
    "IsNaN": torch.isnan,
    "Softplus": F.softplus,
}


def unary(call: Call) -> Any:
    """An elementwise operator of one value."""
    value = call.value(0)
    if is_host(value) and call.op in UNARY:
        return each(UNARY[call.op], value)
    return _TENSOR_UNARY[call.op](as_tensor(value))


def where(call: Call) -> Any:
    """Where."""
    condition, x, y = (call.value(i) for i in range(3))
    if all(is_host(v) for v in (condition, x, y)):
        return each(choose, condition, x, y)
    x, y = (_operand(v, condition) for v in (x, y))
    if is_host(x) and is_host(y):
        x = as_tensor(x)
    return torch.where(as_tensor(condition), x, y)


def gelu(call: Call) -> Any:
    """Gelu."""
    return F.gelu(call.tensor(0), approximate=call.get("approximate", "none"))


def swish(call: Call) -> Any:
    """Swish, which with alpha 1 is SiLU."""
    call.require(call.get("alpha", 1.0) == 1.0, "alpha")
    return F.silu(call.tensor(0))


def clip(call: Call) -> Any:
    """Clip."""
    low, high = (call.value(i, None) for i in (1, 2))
    return torch.clamp(call.tensor(0), *(v if v is None else as_list(v)[0] for v in (low, high)))


def softmax(call: Call) -> Any:
    """Softmax."""
    return torch.softmax(call.tensor(0), call.get("axis", -1))


def reduce(call: Call) -> Any:
    """ReduceMean and its like over axes that are an input (or, before opset 18, an attribute)."""
    source, keep = call.tensor(0), bool(call.get("keepdims", 1))
    axes = as_list(call.value(1)) if call.has(1) else call.get("axes", None)
    idle = call.get("noop_with_empty_axes", 0)
    if not axes:
        if idle:
            return source
        axes = list(range(source.dim()))
    if call.op == "ReduceMean":
        return source.mean(axes, keepdim=keep)
    if call.op == "ReduceSum":
        return source.sum(axes, keepdim=keep)
    if call.op == "ReduceL2":
        return torch.linalg.vector_norm(source, 2, axes, keepdim=keep)
    if source.dtype == torch.bool:
        source = source.to(torch.uint8)
    return (source.amax if call.op == "ReduceMax" else source.amin)(axes, keepdim=keep)


def matmul(call: Call) -> Any:
    """MatMul. Masks of numbers widen half precision; the product is in the narrower type."""
    a, b = call.tensor(0), call.tensor(1)
    if a.dtype != b.dtype and call.half in (a.dtype, b.dtype):
        a, b = a.to(call.half), b.to(call.half)
    if a.dim() > 1 and b.dim() > 1 and a.shape[-1] == 1 == b.shape[-2]:
        return a * b  # an outer product, as in tables of rotary embedding
    return torch.matmul(a, b)


def linear(call: Call) -> Any:
    """A product with a weight [out, in] (made of MatMul and Gemm when the graph was read)."""
    return F.linear(call.tensor(0), call.tensor(1), call.value(2, None))


def gemm(call: Call) -> Any:
    """Gemm of values that are no weights."""
    call.require(call.get("alpha", 1.0) == 1.0 and call.get("beta", 1.0) == 1.0, "alpha, beta")
    a, b = call.tensor(0), call.tensor(1)
    product = (a.T if call.get("transA", 0) else a) @ (b.T if call.get("transB", 0) else b)
    return product + call.tensor(2) if call.has(2) else product


def layer_norm(call: Call) -> Any:
    """LayerNormalization."""
    call.get("stash_type", 1)
    source, weight = call.tensor(0), call.tensor(1)
    axis = call.get("axis", -1) % source.dim()
    bias = call.tensor(2) if call.has(2) else None
    return F.layer_norm(source, source.shape[axis:], weight, bias, call.get("epsilon", 1e-5))


def rms_norm(call: Call) -> Any:
    """RMSNormalization over the last dimension, as the operators that are recognised as one."""
    call.get("stash_type", 1)
    source, weight = call.tensor(0), call.tensor(1)
    call.require(call.get("axis", -1) % source.dim() == source.dim() - 1, "another axis")
    wide = source.float()
    mean = wide.pow(2).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(mean + call.get("epsilon", 1e-5))
    return weight * normed.to(source.dtype)


def rotary(call: Call) -> Any:
    """RotaryEmbedding of x [batch, heads, tokens, dim] with tables of half its width."""
    call.require(not call.has(3) and not call.get("interleaved", 0), "ids or interleaved pairs")
    call.get("num_heads", 0)
    source, width = call.tensor(0), call.get("rotary_embedding_dim", 0)
    call.require(source.dim() == 4, "three dimensions")
    cos, sin = (torch.cat((t, t), -1).unsqueeze(1) for t in (call.tensor(1), call.tensor(2)))
    width = width or source.shape[-1]
    turned, rest = source[..., :width], source[..., width:]
    low, high = turned[..., : width // 2], turned[..., width // 2 :]
    out = turned * cos + torch.cat((-high, low), -1) * sin
    return out if width == source.shape[-1] else torch.cat((out, rest), -1)


def experts(call: Call) -> Any:
    """A mixture of experts as our exporter writes it: sitsc::moe of one rank, without residual."""
    form: MoeForm = call.get("form")
    call.require(len(call.inputs) == len(form.inputs), "other inputs")
    given = {name: call.tensor(index) for index, name in enumerate(form.inputs)}
    return torch.ops.sitsc.moe.default(
        given["x"],
        given["logits"],
        given.get("correction"),
        None,
        None,
        given["gate_up"],
        None,
        given.get("gate_up_bias"),
        given["down"],
        None,
        given.get("down_bias"),
        given["gate_up"].shape[1],
        form.top_k,
        form.scoring,
        form.groups,
        form.group_top,
        form.normalise,
        form.scaling,
        form.activation,
        form.alpha,
        form.limit,
        "plain",
    )


def attention(call: Call) -> Any:
    """Attention of q, k, v [batch, heads, tokens, dim]; an empty past is no past."""
    for name, idle in (("qk_matmul_output_mode", 0), ("softmax_precision", 1), ("softcap", 0.0)):
        call.require(call.get(name, idle) in (idle, 0), name)
    q, k, v = (call.tensor(i) for i in range(3))
    call.require(q.dim() == 4 and call.num_outputs <= 3, "three dimensions or scores")
    for name in ("q_num_heads", "kv_num_heads"):
        call.get(name, 0)
    for past in (4, 5):
        call.require(not call.has(past) or call.tensor(past).shape[2] == 0, "a past")
    mask = call.tensor(3) if call.has(3) else None
    causal, scale = bool(call.get("is_causal", 0)), call.get("scale", None)
    call.require(mask is None or not causal, "a mask and is_causal")
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return (out, k, v)[: call.num_outputs]


OPERATORS: dict[str, Callable[[Call], Any]] = {
    **SHAPE_OPS,
    **dict.fromkeys(BINARY, binary),
    **dict.fromkeys(_TENSOR_UNARY, unary),
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceL2", "ReduceMax", "ReduceMin"), reduce),
    "Where": where,
    "Gelu": gelu,
    "Swish": swish,
    "Clip": clip,
    "Softmax": softmax,
    "MatMul": matmul,
    "Gemm": gemm,
    "Linear.sitsc": linear,
    "Moe.sitsc": experts,
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "RotaryEmbedding": rotary,
    "Attention": attention,
}
"""Operators by name; those of "sitsc" are no ONNX operators, no file can name them."""
