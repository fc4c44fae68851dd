"""Strict reader of safetensors files: headers checked as a security boundary, bytes by mmap.

In: a path that the caller has checked to lie inside the model folder. Out: `TensorSpan`s, and
rows of one tensor. Never trusts a number of the header, never maps more than what is asked for.
"""

import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sitsc.core.errors import CheckpointError
from sitsc.frontend.checkpoint_types import Rows, TensorInfo
from sitsc.frontend.safe_files import parse_json_object, shown

MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 8
MAX_DIMENSION = 1 << 48
DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
HINT = "the file is damaged or was cut short; fetch it again"


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """Where a tensor lies: `offset` counts bytes from the start of the file."""

    info: TensorInfo
    offset: int


def read_header(path: Path) -> dict[str, TensorSpan]:
    """All tensors of one safetensors file by name; CheckpointError when anything is off."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header_bytes = _header_length(file.read(8), size, path.name)
            raw = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    if len(raw) != header_bytes or not raw.startswith(b"{"):
        raise CheckpointError(f"{path.name} has no safetensors header", hint=HINT)
    header = parse_json_object(raw, path.name)
    _check_metadata(header.pop("__metadata__", {}), path.name)
    spans = [_span(name, entry, path.name) for name, entry in header.items()]
    return _laid_out(spans, base=8 + header_bytes, size=size, file=path.name)


def _header_length(prefix: bytes, size: int, file: str) -> int:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length < 2 or length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointError(
            f"{file} is not a whole safetensors file: header of {length} bytes, file of {size}",
            hint=HINT,
        )
    return length


def _check_metadata(metadata: Any, file: str) -> None:
    texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    if not texts:
        raise CheckpointError(f"{file}: __metadata__ is not a map of texts", hint=HINT)


def _span(name: str, entry: Any, file: str) -> TensorSpan:
    """One header entry, checked by itself; its offset still counts from the data's start."""
    if not name or len(name) > 512 or not name.isprintable():
        raise CheckpointError(f"{file}: tensor name {shown(name)} is not plain text", hint=HINT)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{file}: entry of {shown(name)} must hold dtype, shape and data_offsets", hint=HINT
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{file}: {shown(name)} has unknown dtype {shown(dtype)}",
            hint=f"known: {', '.join(DTYPES)}",
        )
    if not _whole_numbers(shape, MAX_DIMENSION) or len(shape) > MAX_RANK:
        raise CheckpointError(f"{file}: {shown(name)} has bad shape {shown(shape)}", hint=HINT)
    if not _whole_numbers(offsets, 1 << 62) or len(offsets) != 2:
        raise CheckpointError(
            f"{file}: {shown(name)} has bad data_offsets {shown(offsets)}", hint=HINT
        )
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{file}: {shown(name)} spans {offsets[1] - offsets[0]} bytes, "
            f"its shape and dtype need {nbytes}",
            hint=HINT,
        )
    return TensorSpan(TensorInfo(name, dtype, tuple(shape), nbytes, file), offsets[0])


def _whole_numbers(values: Any, limit: int) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v <= limit for v in values)


def _laid_out(spans: list[TensorSpan], *, base: int, size: int, file: str) -> dict[str, TensorSpan]:
    """Spans with offsets from the file's start, after checking that they tile the data exactly."""
    end = 0
    result: dict[str, TensorSpan] = {}
    for span in sorted(spans, key=lambda s: (s.offset, s.info.nbytes)):
        if span.offset != end:
            what = "overlaps the tensor before it" if span.offset < end else "leaves a hole"
            raise CheckpointError(f"{file}: {shown(span.info.name)} {what}", hint=HINT)
        end += span.info.nbytes
        result[span.info.name] = TensorSpan(span.info, base + span.offset)
    if base + end != size:
        raise CheckpointError(
            f"{file} has {size} bytes, its header describes {base + end}", hint=HINT
        )
    return result


def read_span(path: Path, span: TensorSpan, rows: Rows = None) -> torch.Tensor:
    """The tensor, or rows [a, b) of it, as a private mapping of just these bytes of the file."""
    info, dtype = span.info, DTYPES[span.info.dtype]
    shape, start, nbytes = list(info.shape), span.offset, info.nbytes
    if rows is not None:
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        shape[0], start, nbytes = rows[1] - rows[0], start + rows[0] * row_bytes, 0
        nbytes = shape[0] * row_bytes
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    return map_bytes(path, start, nbytes, dtype.itemsize).view(dtype).reshape(shape)


def map_bytes(path: Path, start: int, nbytes: int, alignment: int = 1) -> torch.Tensor:
    """uint8 [nbytes] over bytes [start, start + nbytes) of the file; a copy if not aligned."""
    page_start = start - start % mmap.ALLOCATIONGRANULARITY
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < start + nbytes:
                raise CheckpointError(f"{path.name} has become shorter since it was opened")
            mapped = mmap.mmap(
                file.fileno(),
                start - page_start + nbytes,
                access=mmap.ACCESS_COPY,
                offset=page_start,
            )
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {error.strerror}") from error
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=start - page_start)
    return data.clone() if start % alignment else data
