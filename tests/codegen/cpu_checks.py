"""What the tests of the CPU kernels share: errors, guarded outputs, packed weights."""

import math

import torch
from torch import Tensor

from sitsc.core.weight_formats import format_of, pack, pad_scale, quantize_int8

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
TOLERANCE = {F32: 2e-6, BF16: 8e-3}


def error_of(ours: Tensor, reference: Tensor) -> float:
    """max|a-b| / max|b|."""
    difference = (ours.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max().clamp_min(1e-30))


class Guarded:
    """An output [rows, cols] of NaN inside a larger buffer, to see writes outside it."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype, gap: int = 5) -> None:
        self.stride = cols + gap
        self.buffer = torch.full(((rows + 2) * self.stride,), math.nan, dtype=dtype)
        self.out = self.buffer[self.stride :].as_strided(
            (rows, cols), (self.stride, 1), self.stride
        )

    def check(self) -> None:
        inside = self.out.clone()
        assert not inside.isnan().any()
        self.out.fill_(math.nan)
        assert self.buffer.isnan().all()
        self.out.copy_(inside)


def rms(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    x = x.double()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * (weight.double() + offset)


def packed(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Packed weight, padded scale or None, and the float64 weight it stands for."""
    if dtype is INT8:
        values, scale = quantize_int8(weight)
        return pack(values, "n16k2"), pad_scale(scale), values.double() * scale.double()[:, None]
    weight = weight.to(dtype)
    return pack(weight, format_of(dtype)), None, weight.double()
