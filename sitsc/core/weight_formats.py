"""How linear weights lie in memory for the CPU kernels: blocks of 16 output rows.

`n16` (float32): [blocks, K, 16]. `n16k2` (bfloat16, int8): [blocks, ceil(K/2), 16, 2], so that one
SIMD lane holds two neighbours in k of one output row. Rows and k are padded with zeros. int8 has
one float32 scale an output row, padded with zeros to whole blocks. Never reads a file.
"""

import torch
from torch import Tensor

from sitsc.core import weight_spec
from sitsc.core.weight_spec import BLOCK_ROWS, PAIR, num_blocks

_FORMATS = {torch.float32: "n16", torch.bfloat16: "n16k2", torch.int8: "n16k2"}


def format_of(dtype: torch.dtype) -> str:
    """The format of a weight of `dtype`: `n16` for float32, `n16k2` for bfloat16 and int8."""
    if dtype not in _FORMATS:
        raise ValueError(f"no packed weight format for {dtype}")
    return _FORMATS[dtype]


def packed_shape(rows: int, cols: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of the packed form of a [rows, cols] weight of `dtype`."""
    return weight_spec.packed_shape(rows, cols, format_of(dtype))


def packed_nbytes(rows: int, cols: int, dtype: torch.dtype) -> int:
    """Bytes of the packed form of a [rows, cols] weight of `dtype`, scales not counted."""
    return torch.Size(packed_shape(rows, cols, dtype)).numel() * dtype.itemsize


def pack_into(packed: Tensor, rows: Tensor, first_row: int) -> None:
    """Write `rows` [count, K] to its place in `packed`, from output row `first_row` on.

    Packs a big weight a few rows at a time: `first_row` is a multiple of 16, and `count` is one
    too unless these are the last rows. Raises ValueError where that, the shape or dtype is off.
    """
    count, cols = rows.shape
    first_block, blocks = first_row // BLOCK_ROWS, num_blocks(count)
    if first_row % BLOCK_ROWS or first_row < 0:
        raise ValueError(f"first row {first_row} is not a multiple of {BLOCK_ROWS}")
    if count % BLOCK_ROWS and first_block + blocks != packed.shape[0]:
        raise ValueError(f"{count} rows end inside a block that is not the last")
    if packed.shape[1:] != packed_shape(count, cols, rows.dtype)[1:] or packed.dtype != rows.dtype:
        raise ValueError(f"rows {tuple(rows.shape)} {rows.dtype} do not fit the packed tensor")
    if first_block + blocks > packed.shape[0]:
        raise ValueError(f"rows {first_row}..{first_row + count} are past the end of the weight")
    pair = packed.shape[3] if packed.dim() == 4 else 1
    target = packed[first_block : first_block + blocks].view(blocks, -1, BLOCK_ROWS, pair)
    if count == blocks * BLOCK_ROWS and cols == target.shape[1] * pair:
        source = rows
    else:
        source = rows.new_zeros(blocks * BLOCK_ROWS, target.shape[1] * pair)
        source[:count, :cols] = rows
    target.copy_(source.reshape(blocks, BLOCK_ROWS, -1, pair).permute(0, 2, 1, 3))


def pack(weight: Tensor, format: str) -> Tensor:
    """The packed form of `weight` [N, K]; `format` must be the one of its dtype."""
    if format != format_of(weight.dtype):
        raise ValueError(f"{weight.dtype} is not packed as {format}")
    rows, cols = weight.shape
    packed = weight.new_empty(packed_shape(rows, cols, weight.dtype))
    pack_into(packed, weight, 0)
    return packed


def unpack(packed: Tensor, rows: int, cols: int, format: str) -> Tensor:
    """The weight [rows, cols] that `packed` holds: the inverse of `pack`."""
    pair = PAIR[format]
    blocks = packed.reshape(packed.shape[0], -1, BLOCK_ROWS, pair)
    return blocks.permute(0, 2, 1, 3).reshape(-1, blocks.shape[1] * pair)[:rows, :cols].contiguous()


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric int8 of `weight` [N, K], one scale an output row: (int8 [N, K], float32 [N]).

    weight ≈ int8 * scale, scale = absmax / 127, an all-zero row has scale 0. NaN or infinite
    weights raise ValueError: no scale can hold them.
    """
    values = weight.float()
    absmax = values.abs().amax(dim=1) if weight.shape[1] else values.new_zeros(weight.shape[0])
    if not bool(torch.isfinite(absmax).all()):
        raise ValueError("weight holds NaN or infinity")
    scale = absmax / 127.0
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    quantized = (values / safe[:, None]).round_().clamp_(-127, 127)
    return quantized.to(torch.int8), torch.where(scale > 0, scale, torch.zeros_like(scale))


def pad_scale(scale: Tensor) -> Tensor:
    """`scale` [N] padded with zeros to whole blocks, as the kernels read it."""
    padded = scale.new_zeros(num_blocks(scale.shape[0]) * BLOCK_ROWS)
    padded[: scale.shape[0]] = scale
    return padded
