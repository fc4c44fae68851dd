"""Strict parser of a GGUF header: metadata and tensor table, with every length bounded first.

In: a path. Out: `GgufHeader`. Versions 2 and 3, little-endian. Never allocates more than the
header's own size calls for, never reads tensor bytes.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from sitsc.core.errors import CheckpointError
from sitsc.frontend.checkpoint_types import TensorInfo
from sitsc.frontend.safe_files import shown

MAX_ENTRIES = 1 << 16
MAX_ARRAY = 4 << 20
MAX_HEADER_BYTES = 256 << 20
MAX_DIMENSION = 1 << 48
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q"} | {
    12: "d"
}
HINT = "the file is damaged or was cut short; fetch it again"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as the file has it: its GGUF name, shape in torch's order, absolute offset."""

    info: TensorInfo
    offset: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata values (arrays as lists) and tensors by GGUF name."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads little-endian values off a mapped file and refuses to pass its end."""

    def __init__(self, data: mmap.mmap, file: str) -> None:
        self.data, self.file, self.position = data, file, 0
        self.end = min(len(data), MAX_HEADER_BYTES)
        self.array_budget = 2 * MAX_ARRAY

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {what}", hint=HINT)

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.end - self.position:
            raise self.fail(f"header ends early at byte {self.position}")
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def numbers(self, code: str, count: int) -> list[Any]:
        raw = self.take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", raw))

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def text(self) -> str:
        raw = self.take(self.u64())
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"text at byte {self.position} is not UTF-8") from error

    def name(self) -> str:
        text = self.text()
        if not text or len(text) > 256 or not text.isprintable():
            raise self.fail(f"{shown(text)} is not a name")
        return text

    def value(self) -> Any:
        kind = self.u32()
        return self.array() if kind == ARRAY else self.items(kind, 1)[0]

    def array(self) -> list[Any]:
        kind, count = self.u32(), self.u64()
        if count > MAX_ARRAY or count > self.array_budget:
            raise self.fail(f"array of {count} elements, the limit is {MAX_ARRAY}")
        self.array_budget -= count
        return self.items(kind, count)

    def items(self, kind: int, count: int) -> list[Any]:
        if kind == STRING:
            if count * 8 > self.end - self.position:
                raise self.fail(f"array of {count} texts does not fit the file")
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise self.fail(f"unknown value type {kind} at byte {self.position}")
        values = self.numbers(SCALARS[kind], count)
        return [bool(v) for v in values] if kind == BOOL else values


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check the header of one GGUF file; CheckpointError when anything is off."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise CheckpointError(f"{path.name} is not a GGUF file", hint=HINT)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    with data:
        return _parse(_Cursor(data, path.name), len(data))


def _parse(cursor: _Cursor, size: int) -> GgufHeader:
    cursor.take(4)
    version = cursor.u32()
    if version not in (2, 3):
        raise CheckpointError(
            f"{cursor.file}: GGUF version {version} is not supported",
            hint="convert again with a current, little-endian converter (versions 2 and 3)",
        )
    num_tensors, num_values = cursor.u64(), cursor.u64()
    if max(num_tensors, num_values) > MAX_ENTRIES:
        raise cursor.fail(f"{num_tensors} tensors and {num_values} values are beyond the limits")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.name()
        if key in metadata:
            raise cursor.fail(f"key {shown(key)} is given twice")
        metadata[key] = cursor.value()
    table = [_tensor(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    whole = type(alignment) is int and 1 <= alignment <= 1 << 20
    if not whole or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {shown(alignment)}")
    return GgufHeader(metadata, _laid_out(cursor, table, alignment, size))


def _tensor(cursor: _Cursor) -> GgufTensor:
    """One row of the tensor table; its offset still counts from the data's start."""
    name, rank = cursor.name(), cursor.u32()
    if not 1 <= rank <= 4:
        raise cursor.fail(f"{shown(name)} has {rank} dimensions")
    shape = tuple(reversed(cursor.numbers("Q", rank)))
    kind, offset = cursor.u32(), cursor.u64()
    try:
        dtype = GGMLQuantizationType(kind)
    except ValueError as error:
        raise cursor.fail(f"{shown(name)} has unknown tensor type {kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[dtype]
    if not all(0 < d <= MAX_DIMENSION for d in shape) or shape[-1] % block:
        raise cursor.fail(f"{shown(name)} has bad shape {shape} for {dtype.name}")
    nbytes = math.prod(shape) // block * block_bytes
    return GgufTensor(TensorInfo(name, dtype.name, shape, nbytes, cursor.file), offset)


def _laid_out(
    cursor: _Cursor, table: list[GgufTensor], alignment: int, size: int
) -> dict[str, GgufTensor]:
    """Tensors with offsets from the file's start, after checking order, padding and the end."""
    base = -(-cursor.position // alignment) * alignment
    expected, end = 0, 0
    result: dict[str, GgufTensor] = {}
    for tensor in table:
        name = tensor.info.name
        if name in result:
            raise cursor.fail(f"tensor {shown(name)} is given twice")
        if tensor.offset != expected:
            raise cursor.fail(f"{shown(name)} is at offset {tensor.offset}, expected {expected}")
        end = expected + tensor.info.nbytes
        expected = -(-end // alignment) * alignment
        result[name] = GgufTensor(tensor.info, base + tensor.offset)
    if table and base + end > size:
        raise cursor.fail(f"file has {size} bytes, its tensors need {base + end}")
    return result
