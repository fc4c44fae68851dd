"""Packing of weights: pack and unpack are inverses, padding is zero, int8 is as close as it can."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.weight_formats import (
    format_of,
    num_blocks,
    pack,
    pack_into,
    packed_nbytes,
    packed_shape,
    pad_scale,
    quantize_int8,
    unpack,
)

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])
SIZES = st.integers(min_value=1, max_value=70)


def random_weight(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    return torch.randint(1, 128, (rows, cols), generator=generator).to(dtype)


@settings(deadline=None)
@given(rows=SIZES, cols=SIZES, dtype=DTYPES)
def test_unpack_is_the_inverse_of_pack(rows, cols, dtype):
    weight = random_weight(rows, cols, dtype)
    packed = pack(weight, format_of(dtype))
    assert packed.shape == packed_shape(rows, cols, dtype)
    assert packed.numel() * packed.element_size() == packed_nbytes(rows, cols, dtype)
    assert torch.equal(unpack(packed, rows, cols, format_of(dtype)), weight)
    # All values are positive, so whatever else is there must be zero padding.
    assert int((packed != 0).sum()) == weight.numel()


@settings(deadline=None)
@given(rows=SIZES, cols=SIZES, dtype=DTYPES, step_blocks=st.integers(1, 3))
def test_packing_in_pieces_gives_the_same(rows, cols, dtype, step_blocks):
    weight = random_weight(rows, cols, dtype)
    packed = torch.full(packed_shape(rows, cols, dtype), 99, dtype=dtype)
    for first in range(0, rows, step_blocks * 16):
        pack_into(packed, weight[first : first + step_blocks * 16], first)
    assert torch.equal(packed, pack(weight, format_of(dtype)))


def test_layout_is_the_one_the_kernels_read():
    weight = torch.arange(40 * 6, dtype=torch.float32).view(40, 6)
    assert pack(weight, "n16")[1, 4, 3] == weight[19, 4]
    assert pack(weight.bfloat16(), "n16k2")[1, 2, 3, 1] == weight[19, 5]


@settings(deadline=None)
@given(rows=SIZES, cols=SIZES, exponent=st.integers(-30, 30))
def test_int8_is_within_half_a_step(rows, cols, exponent):
    weight = torch.randn(rows, cols) * 2.0**exponent
    weight[0] = 0
    quantized, scale = quantize_int8(weight)
    assert scale.dtype is torch.float32 and scale[0] == 0
    error = (weight.double() - quantized.double() * scale.double()[:, None]).abs()
    assert bool((error <= scale.double()[:, None] * 0.5001).all())
    if rows > 1:
        assert bool((quantized[1:].abs().amax(dim=1) == 127).all())


def test_int8_of_extreme_rows():
    for value in (1e-45, 3e38, 0.0):
        quantized, scale = quantize_int8(torch.tensor([[value, -value]]))
        assert bool(torch.isfinite(quantized * scale[:, None]).all())
    for bad in (math.nan, math.inf):
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize_int8(torch.tensor([[1.0, bad]]))


def test_scale_padding():
    padded = pad_scale(torch.ones(33))
    assert padded.shape == (num_blocks(33) * 16,)
    assert padded.sum() == 33


def test_mistakes_are_refused():
    weight = torch.ones(40, 6)
    packed = pack(weight, "n16")
    for rows, first in [(weight[:16], 8), (weight[:10], 0), (weight[:, :5], 0), (weight, 16)]:
        with pytest.raises(ValueError):
            pack_into(packed, rows, first)
    with pytest.raises(ValueError, match="not packed as"):
        pack(weight, "n16k2")
    with pytest.raises(ValueError, match="no packed weight format"):
        packed_shape(1, 1, torch.float16)
