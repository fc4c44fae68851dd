"""What a planned weight buffer is made of, and making it: slices, quantisation, packing.

In: a `WeightSpec` and a reader of checkpoint tensors. Out: the tensor exactly as kernels read it.
For the packer, the loader of unpacked artifacts and graph checks; holds one buffer at a time.
"""

from collections.abc import Callable

import torch

from sitsc.core import weight_formats
from sitsc.core.ranges import cuts_of
from sitsc.core.weight_spec import STACKED, ZEROS, TensorSlice, WeightSpec

__all__ = [
    "DTYPES",
    "STACKED",
    "ZEROS",
    "ReadRows",
    "TensorSlice",
    "WeightSpec",
    "constant_spec",
    "dtype_name",
    "materialise",
]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "float64": torch.float64,
}


def dtype_name(dtype: torch.dtype) -> str:
    """The plan's name of a torch dtype ("bfloat16")."""
    return str(dtype).removeprefix("torch.")


def constant_spec(name: str, value: torch.Tensor) -> WeightSpec:
    """The spec of a small tensor that tracing computed (rotary frequencies and the like)."""
    flat = value.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes().hex()
    shape = tuple(value.shape)
    return WeightSpec(name, "constant", (), shape, dtype_name(value.dtype), "plain", data)


ReadRows = Callable[[str, int, int], torch.Tensor]


def materialise(spec: WeightSpec, read: ReadRows) -> torch.Tensor:
    """The buffer of `spec` (`stored_shape`); `read(tensor, start, stop)` gives checkpoint rows."""
    if spec.role == "constant":
        raw = torch.tensor(list(bytes.fromhex(spec.data)), dtype=torch.uint8)
        return raw.view(DTYPES[spec.dtype]).reshape(spec.shape)
    if len(spec.shape) == 3 or (spec.role == "scale" and len(spec.shape) == 2):
        return _matrices(spec, read)
    if spec.role == "scale":
        return _scales(spec, read)
    if spec.format == "plain":
        parts = [_stored(spec, _part(spec, s, s.start, s.stop, read)) for s in spec.sources]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
    return _packed(spec, read)


def _matrices(spec: WeightSpec, read: ReadRows) -> torch.Tensor:
    """Matrices one after another; every slice holds whole ones."""
    out, done = torch.empty(spec.stored_shape, dtype=DTYPES[spec.dtype]), 0
    rows = spec.shape[1]
    each = out.view(spec.shape[0], -1, *out.shape[1:]) if spec.format != "plain" else out
    each = out.view(spec.shape[0], -1) if spec.role == "scale" else each
    for source in spec.sources:
        value = source.of(read(source.tensor, source.start, source.stop))
        for matrix in value.reshape(-1, rows, value.shape[-1]):
            if spec.role == "scale":
                scale = weight_formats.quantize_int8(matrix)[1]
                each[done] = weight_formats.pad_scale(scale)
            elif spec.format == "plain":
                each[done] = _stored(spec, matrix)
            else:
                weight_formats.pack_into(each[done], _stored(spec, matrix), 0)
            done += 1
    return out


def _part(
    spec: WeightSpec, source: TensorSlice, start: int, stop: int, read: ReadRows
) -> torch.Tensor:
    """Rows [start, stop) of what a slice is taken from, or columns where it takes those."""
    if source.zeros:
        return torch.zeros((stop - start, *spec.shape[1:]), dtype=_dtype_of_rows(spec))
    if "columns" in source.part.split():
        cut = next((c for c in cuts_of(source.part) if c.dim == -1), None)
        ranges = ((0, spec.shape[1]),) if cut is None else cut.ranges
        rows = [read(source.tensor, *piece)[:, start:stop] for piece in ranges]
        return torch.cat(rows).T
    return source.of(read(source.tensor, start, stop))


def _dtype_of_rows(spec: WeightSpec) -> torch.dtype:
    """What zeros are made of: the type of the buffer, before it is quantised."""
    kind = DTYPES[spec.dtype]
    return kind if kind.is_floating_point else torch.float32


def _rows(spec: WeightSpec, read: ReadRows, start: int, stop: int) -> torch.Tensor:
    """Rows [start, stop) of the concatenated slices."""
    parts, base = [], 0
    for piece in spec.sources:
        low, high = max(start, base), min(stop, base + piece.stop - piece.start)
        if low < high:
            first, last = piece.start + low - base, piece.start + high - base
            parts.append(_part(spec, piece, first, last, read))
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
    """The scale of each row; that of zeros, whose columns the spec does not know, is zero."""
    out, base = torch.zeros(spec.stored_shape, dtype=torch.float32), 0
    for piece in spec.sources:
        count = 0 if piece.zeros else piece.stop - piece.start
        for done in range(0, count, _CHUNK_ROWS):
            start, stop = piece.start + done, piece.start + min(count, done + _CHUNK_ROWS)
            scale = weight_formats.quantize_int8(_part(spec, piece, start, stop, read))[1]
            out[base + done : base + done + len(scale)] = scale
        base += piece.stop - piece.start
    return out
