"""What a planned weight buffer is made of, and making it: slices, quantisation, packing.

In: a `WeightSpec` and a reader of checkpoint tensors. Out: the tensor exactly as kernels read it.
For the packer, the loader of unpacked artifacts and graph checks; holds one buffer at a time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sitsc.core import weight_formats

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The plan's name of a torch dtype ("bfloat16")."""
    return str(dtype).removeprefix("torch.")


def constant_spec(name: str, value: torch.Tensor) -> "WeightSpec":
    """The spec of a small tensor that tracing computed (rotary frequencies and the like)."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes().hex()
    shape = tuple(value.shape)
    return WeightSpec(name, "constant", (), shape, dtype_name(value.dtype), "plain", data)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows [start, stop) of dimension 0 of one checkpoint tensor."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight buffer: slices concatenated along dimension 0, then quantised and packed.

    `shape` is the logical shape [rows, columns] or [rows]; `role` is "weight", "scale" (the int8
    row scales of the same slices) or "constant" (a small tensor computed while tracing; `data` is
    the hex of its little-endian bytes, empty for other roles).
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
            return (weight_formats.num_blocks(self.shape[0]) * weight_formats.BLOCK_ROWS,)
        if self.format == "plain":
            return self.shape
        return weight_formats.packed_shape(self.shape[0], self.shape[1], DTYPES[self.dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer in memory and in the file."""
        return math.prod(self.stored_shape) * DTYPES[self.dtype].itemsize


ReadRows = Callable[[str, int, int], torch.Tensor]


def materialise(spec: WeightSpec, read: ReadRows) -> torch.Tensor:
    """The buffer of `spec` (`stored_shape`); `read(tensor, start, stop)` gives checkpoint rows."""
    if spec.role == "constant":
        raw = torch.tensor(list(bytes.fromhex(spec.data)), dtype=torch.uint8)
        return raw.view(DTYPES[spec.dtype]).reshape(spec.shape)
    if spec.role == "scale":
        return _scales(spec, read)
    if spec.format == "plain":
        parts = [_stored(spec, read(s.tensor, s.start, s.stop)) for s in spec.sources]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
    return _packed(spec, read)


def _rows(spec: WeightSpec, read: ReadRows, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of the concatenated slices."""
    parts, base = [], 0
    for piece in spec.sources:
        low, high = max(start, base), min(stop, base + piece.stop - piece.start)
        if low < high:
            parts.append(read(piece.tensor, piece.start + low - base, piece.start + high - base))
        base += piece.stop - piece.start
    return parts[0] if len(parts) == 1 else torch.cat(parts)


_CHUNK_ROWS = 4096


def _stored(spec: WeightSpec, rows: torch.Tensor) -> torch.Tensor:
    """Rows in the dtype of the buffer."""
    if spec.dtype == "int8":
        return weight_formats.quantize_int8(rows)[0]
    return rows.to(DTYPES[spec.dtype])


def _packed(spec: WeightSpec, read: ReadRows) -> torch.Tensor:
    out = torch.empty(spec.stored_shape, dtype=DTYPES[spec.dtype])
    for start in range(0, spec.shape[0], _CHUNK_ROWS):
        rows = _rows(spec, read, start, min(spec.shape[0], start + _CHUNK_ROWS))
        weight_formats.pack_into(out, _stored(spec, rows), start)
    return out


def _scales(spec: WeightSpec, read: ReadRows) -> torch.Tensor:
    out = torch.zeros(spec.stored_shape, dtype=torch.float32)
    for start in range(0, spec.shape[0], _CHUNK_ROWS):
        stop = min(spec.shape[0], start + _CHUNK_ROWS)
        out[start:stop] = weight_formats.quantize_int8(_rows(spec, read, start, stop))[1]
    return out
