"""Reading a cubin (a CUDA ELF file): its architecture, its kernels, where their parameters lie.

In: bytes that may be anything. Out: what the driver will believe about them, or ArtifactError;
nothing outside the bytes is ever read and no value in them is trusted.
"""

import struct
from dataclasses import dataclass

from sitsc.core.errors import ArtifactError

_HEADER_BYTES, _SECTION_BYTES = 64, 64
_MACHINE_CUDA = 190
_MOST_SECTIONS = 4096
_MOST_PARAMETERS = 512
_MOST_PARAMETER_BYTES = 32764  # what a kernel can take on any architecture
_NO_BYTES = 8  # section type of memory that has no bytes in the file
_INFO = ".nv.info."
# Attributes of .nv.info (EIATTR_*) and how their values are stored.
_SIZED, _HALF = 4, 3
_PARAMETER, _PARAMETERS_SIZE, _THREADS, _API = 0x17, 0x19, 0x10, 0x37


@dataclass(frozen=True, slots=True)
class Parameter:
    """Where one parameter lies in the parameter buffer, in bytes."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class CubinKernel:
    """One kernel: its parameters in order, threads a block (0: any), CUDA version (13.3: 133)."""

    name: str
    parameters: tuple[Parameter, ...]
    parameter_bytes: int
    num_threads: int
    cuda_version: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Compute capability (90) and kernels of a cubin."""

    sm: int
    kernels: dict[str, CubinKernel]


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    start: int
    size: int


def read_cubin(data: bytes) -> Cubin:
    """What a cubin holds. Raises ArtifactError for anything that is not a whole, sane cubin."""
    try:
        sm = _architecture(data)
        kernels = {}
        for section in _sections(data):
            if section.name.startswith(_INFO):
                name = section.name.removeprefix(_INFO)
                info = data[section.start : section.start + section.size]
                kernels[name] = _kernel(name, info)
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise _bad(str(error)) from None
    if not kernels:
        raise _bad("it holds no kernel")
    return Cubin(sm, kernels)


def _bad(reason: str) -> ArtifactError:
    return ArtifactError(f"not a usable cubin: {reason}", hint="copy or compile it again")


def _architecture(data: bytes) -> int:
    """Compute capability from the ELF header; its place depends on the version of the format."""
    if len(data) < _HEADER_BYTES or data[:6] != b"\x7fELF\x02\x01":
        raise _bad("no 64-bit ELF header")
    (machine,) = struct.unpack_from("<H", data, 0x12)
    (flags,) = struct.unpack_from("<I", data, 0x30)
    version = data[8]
    if machine != _MACHINE_CUDA or version not in (7, 8):
        raise _bad(f"machine {machine}, format {version}")
    return flags & 0xFF if version == 7 else (flags >> 8) & 0xFF


def _sections(data: bytes) -> list[_Section]:
    """All sections that have bytes, each checked to lie inside the file."""
    (start,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    if entry_bytes != _SECTION_BYTES or not 0 < count <= _MOST_SECTIONS or names_at >= count:
        raise _bad("a damaged section table")
    _inside(data, start, count * _SECTION_BYTES, "section table")
    rows = [struct.unpack_from("<II8xQQQ", data, start + i * _SECTION_BYTES) for i in range(count)]
    rows = [(name, kind, at, size) for name, kind, _, at, size in rows]
    for _, kind, at, size in rows:
        if kind != _NO_BYTES:
            _inside(data, at, size, "section")
    _, kind, at, size = rows[names_at]
    names = data[at : at + size] if kind != _NO_BYTES else b""
    found = [_Section(_name(names, n), k, at, size) for n, k, at, size in rows]
    return [section for section in found if section.kind != _NO_BYTES]


def _inside(data: bytes, start: int, size: int, what: str) -> None:
    if start + size > len(data):
        raise _bad(f"a {what} reaches to byte {start + size} of {len(data)}")


def _name(names: bytes, at: int) -> str:
    end = names.find(b"\0", at)
    if at >= len(names) or end < 0:
        raise _bad("a section has no name")
    return names[at:end].decode("ascii")


def _kernel(name: str, info: bytes) -> CubinKernel:
    """One kernel from its attributes."""
    found: dict[int, Parameter] = {}
    total = threads = api = 0
    for attribute, value in _attributes(info):
        if attribute == _PARAMETER:
            _, ordinal, offset, packed = struct.unpack("<IHHI", value)
            if ordinal in found:
                raise _bad(f"parameter {ordinal} of {name} is there twice")
            found[ordinal] = Parameter(offset, packed >> 18)
        elif attribute == _PARAMETERS_SIZE:
            (total,) = struct.unpack("<H", value)
        elif attribute == _THREADS:
            x, y, z = struct.unpack("<III", value)
            threads = x * y * z
        elif attribute == _API:
            (api,) = struct.unpack("<I", value)
    return CubinKernel(name, _ordered(name, found, total), total, threads, api)


def _attributes(info: bytes) -> list[tuple[int, bytes]]:
    """(attribute, value) pairs; a value is two bytes in place, or as many as its size says."""
    pairs, at = [], 0
    while at < len(info):
        form, attribute, word = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _SIZED:
            if at + word > len(info):
                raise _bad("an attribute is cut off")
            pairs.append((attribute, info[at : at + word]))
            at += word
        elif form == _HALF:
            pairs.append((attribute, struct.pack("<H", word)))
    return pairs


def _ordered(name: str, found: dict[int, Parameter], total: int) -> tuple[Parameter, ...]:
    """Parameters by ordinal: none missing, in order, apart from each other, within the buffer."""
    if len(found) > _MOST_PARAMETERS or total > _MOST_PARAMETER_BYTES:
        raise _bad(f"{name} takes {len(found)} parameters in {total} bytes")
    parameters, end = [], 0
    for ordinal in range(len(found)):
        item = found.get(ordinal)
        if item is None or item.size < 1 or item.offset < end or item.offset + item.size > total:
            raise _bad(f"parameter {ordinal} of {name} is missing or lies outside")
        parameters.append(item)
        end = item.offset + item.size
    return tuple(parameters)
