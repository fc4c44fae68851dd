"""sitsc::rope: rotary position embedding of queries or keys.

Styles: "half" rotates (x[i], x[i + rotary/2]), "interleaved" rotates (x[2i], x[2i+1]). Dimensions
past `rotary_dim` pass through. cos and sin hold one value per rotated dimension.
"""

import torch
from torch import Tensor


def rotate_half(x: Tensor) -> Tensor:
    """(-x2, x1) of the two halves of the last dimension."""
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def rotate_pairs(x: Tensor) -> Tensor:
    """(-x[2i+1], x[2i]) of neighbouring pairs of the last dimension."""
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Rotate x [..., head_dim] by cos, sin [..., rotary_dim] (broadcast over heads)."""
    rotary_dim = cos.shape[-1]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    turn = rotate_half if style == "half" else rotate_pairs
    out = rotated * cos + turn(rotated) * sin
    return out if rest.shape[-1] == 0 else torch.cat((out, rest), -1)


@torch.library.custom_op("sitsc::rope", mutates_args=())
def rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """x [1, heads, tokens, head_dim]; cos, sin [tokens, rotary_dim]; style of the module."""
    return rope_reference(x, cos, sin, style).clone()


@rope.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
