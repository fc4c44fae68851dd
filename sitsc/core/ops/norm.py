"""sitsc::rms_norm, sitsc::layer_norm and sitsc::glu: references of the row-wise operators."""

import torch
from torch import Tensor

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "relu": torch.nn.functional.relu,
    "relu2": lambda x: torch.nn.functional.relu(x).square(),
}


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """x [..., hidden] / rms(x) in fp32, rounded to x's dtype, times (offset + weight).

    With offset 1 (Gemma) the product is taken in fp32 and rounded once, as that family does.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if offset:
        return (normed * (offset + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


@torch.library.custom_op("sitsc::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    """RMS norm over the last dimension; x [..., hidden], weight [hidden]."""
    return rms_norm_reference(x, weight, eps, offset).clone()


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, offset: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) of x [..., hidden] in fp32, times weight, plus bias.

    Rounded once. The weight is [hidden], or [heads, hidden] for x [..., heads, hidden].
    """
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(x.dtype)


@torch.library.custom_op("sitsc::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over the last dimension; x [..., hidden], bias [hidden], see the reference."""
    return layer_norm_reference(x, weight, bias, eps).clone(memory_format=torch.contiguous_format)


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def glu_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, elementwise; both [..., intermediate]."""
    return ACTIVATIONS[activation](gate) * up


@torch.library.custom_op("sitsc::glu", mutates_args=())
def glu(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, elementwise; both [..., intermediate]."""
    return glu_reference(gate, up, activation)


@glu.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)
