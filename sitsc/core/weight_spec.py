"""The records that say what a weight buffer is made of, without torch: plans are read with them.

`sitsc.core.weights` makes the tensors that they describe. Sizes of packed matrices are those of
`sitsc.core.weight_formats`.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sitsc.core.ranges import cuts_of

if TYPE_CHECKING:
    import torch

BLOCK_ROWS = 16
PAIR = {"n16": 1, "n16k2": 2}
ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "bool": 1,
    "float64": 8,
}
ZEROS = "zeros"
STACKED = "stacked"


def num_blocks(rows: int) -> int:
    """Blocks of 16 output rows that hold `rows` rows."""
    return -(-rows // BLOCK_ROWS)


def packed_shape(rows: int, cols: int, format: str) -> tuple[int, ...]:
    """Shape of a [rows, cols] weight packed as `format`."""
    pair = PAIR[format]
    return (num_blocks(rows), -(-cols // pair), BLOCK_ROWS) + ((pair,) if pair > 1 else ())


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows [start, stop) of dimension 0 of one checkpoint tensor.

    `part` says what of them is taken, in words: "transposed" (the last two dimensions), then "even"
    or "odd" (rows of a matrix, values of a vector). Empty: they are taken as they are. "columns":
    columns [start, stop) of a matrix instead, each a row of ours. "stacked": matrices [start, stop)
    of a tensor that holds several, where those of a buffer are else tensors of their own.
    "-1[0:16/64]": then of the last dimension, which has 64 elements, those from 0 up to 16
    (sitsc.core.ranges). "zeros": rows that no tensor holds, which pad a weight.
    """

    tensor: str
    start: int
    stop: int
    part: str = ""

    def of(self, value: "torch.Tensor") -> "torch.Tensor":
        """The part of rows as they were read; not for "columns" and "zeros"."""
        words = self.part.split()
        if "transposed" in words:
            value = value.transpose(-1, -2)
        if "even" in words or "odd" in words:
            first = int("odd" in words)
            value = value[..., first::2, :] if value.dim() > 2 else value[..., first::2]
        for cut in cuts_of(self.part):
            value = cut.of(value)
        return value

    @property
    def zeros(self) -> bool:
        """Whether the rows are in no tensor."""
        return self.part == ZEROS


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight buffer: slices concatenated along dimension 0, then quantised and packed.

    `shape` is the logical shape [rows, columns] or [rows]; matrices of experts have a dimension
    before, and each is packed by itself. `role` is "weight", "scale" (the int8 row scales of the
    same slices) or "constant" (a small tensor computed while tracing; `data` is the hex of its
    little-endian bytes, empty for other roles).
    """

    name: str
    role: str
    sources: tuple[TensorSlice, ...]
    shape: tuple[int, ...]
    dtype: str
    format: str
    data: str

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the buffer in memory, blocks and padding included."""
        if self.role == "scale":
            blocks = math.prod(self.shape[:-1]) * num_blocks(self.shape[-1])
            return (blocks * BLOCK_ROWS,)
        if self.format == "plain":
            return self.shape
        one = packed_shape(self.shape[-2], self.shape[-1], self.format)
        return (math.prod(self.shape[:-2]) * one[0], *one[1:])

    def source_shape(self, source: TensorSlice) -> tuple[int, ...]:
        """The shape that the checkpoint tensor of a slice has at least."""
        whole = list(self.shape)
        for cut in cuts_of(source.part):
            whole[cut.dim] = cut.whole
        columns, words = whole[1:], source.part.split()
        if "columns" in words:
            named = any(cut.dim == -2 for cut in cuts_of(source.part))
            return (whole[1], whole[0] if named else source.stop)
        if len(self.shape) == 3 and STACKED not in words and "transposed" not in words:
            columns = whole[2:]
        doubled = 1 + ("even" in words or "odd" in words)
        if "transposed" in words:
            return (source.stop, whole[2], doubled * whole[1])
        return (source.stop, *columns[:-1], *(doubled * size for size in columns[-1:]))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer in memory and in the file."""
        return math.prod(self.stored_shape) * ITEM_BYTES[self.dtype]
