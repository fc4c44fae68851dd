"""Arguments of a kernel to the bytes that it reads them from.

In: a kernel's metadata, its cubin, and values. Out: a parameter buffer laid out as the cubin says.
What disagrees is refused by name; no driver is needed.
"""

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sitsc.core.errors import ArtifactError, TargetError
from sitsc.core.kernel_meta import KernelMeta
from sitsc.runtime.cubin import CubinKernel, read_cubin

TENSOR_MAP_BYTES = 128
_ALIGNMENT = 64  # what a tensor map needs
_FORMATS = {
    "i1": "<?",
    "i8": "<b",
    "u8": "<B",
    "i16": "<h",
    "u16": "<H",
    "i32": "<i",
    "u32": "<I",
    "i64": "<q",
    "u64": "<Q",
    "fp32": "<f",
    "fp64": "<d",
}
_SCRATCH = ("*global scratch", "*profile scratch")  # Triton appends these two to every kernel
_DESCRIPTOR = re.compile(r"tensordesc<[^\[]*\[([^\]]*)\]")


@runtime_checkable
class HasPointer(Protocol):
    """A tensor, or anything else that has an address on the device."""

    def data_ptr(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TensorMap:
    """An encoded tensor descriptor: its 128 bytes, sizes and strides (both in elements)."""

    descriptor: bytes
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Value = int | float | HasPointer | TensorMap
Values = Sequence[Value] | Mapping[str, Value]


def check_layout(cubin: bytes, meta: KernelMeta) -> CubinKernel:
    """The kernel in the cubin, when it is the one of the metadata, argument by argument.

    Raises ArtifactError for a damaged cubin and for any disagreement, TargetError for another
    architecture.
    """
    found = read_cubin(cubin)
    if found.sm != meta.sm:
        raise TargetError(f"the cubin is for sm_{found.sm}, its metadata for sm_{meta.sm}")
    if meta.function not in found.kernels:
        raise _mismatch(meta, f"the cubin holds {', '.join(found.kernels)}")
    kernel = found.kernels[meta.function]
    sizes = [_size(kind, meta) for kind in parameter_types(meta)]
    in_cubin = [parameter.size for parameter in kernel.parameters]
    if sizes != in_cubin:
        raise _mismatch(meta, f"arguments of {sizes} bytes, the cubin takes {in_cubin}")
    if kernel.num_threads not in (0, 32 * meta.num_warps):
        raise _mismatch(
            meta, f"{meta.num_warps} warps, the cubin wants {kernel.num_threads} threads"
        )
    return kernel


def _mismatch(meta: KernelMeta, what: str) -> ArtifactError:
    return ArtifactError(
        f"kernel {meta.function} and its cubin disagree: {what}",
        where=meta.key[:12],
        hint="copy or compile it again",
    )


def parameter_types(meta: KernelMeta) -> list[str]:
    """Types of everything that is passed: a tensor descriptor is its map, sizes and strides."""
    types: list[str] = []
    for _, kind in meta.arguments:
        rank = _rank(kind)
        types += ["map", *["i32"] * rank, *["i64"] * rank] if rank else [kind]
    return [*types, *_SCRATCH]


def num_parameters(kind: str) -> int:
    """How many parameters an argument is passed as."""
    return 1 + 2 * _rank(kind)


def _rank(kind: str) -> int:
    """The number of dimensions of a tensor descriptor; 0 for other types."""
    found = _DESCRIPTOR.match(kind)
    return found[1].count(",") + 1 if found else 0


def _size(kind: str, meta: KernelMeta) -> int:
    if kind == "map":
        return TENSOR_MAP_BYTES
    if kind.startswith("*"):
        return 8
    if kind not in _FORMATS:
        raise _mismatch(meta, f"an argument has the unknown type {kind!r}")
    return struct.calcsize(_FORMATS[kind])


class ParameterBuffer:
    """The bytes of one launch's arguments, and the array of pointers to them for the driver."""

    __slots__ = ("_at", "_memory", "_pointers", "_size")

    def __init__(
        self,
        kernel: CubinKernel,
        meta: KernelMeta,
        values: Values,
        scratch: int,
        types: Sequence[str] = (),
    ) -> None:
        """`types` are those of `parameter_types`, when the caller has them already.

        Raises ArtifactError naming an argument that is missing, misaligned or out of range.
        """
        flat = _flatten(meta, _ordered(meta, values)) + [scratch, 0]
        self._size = kernel.parameter_bytes
        self._memory = (ctypes.c_char * (self._size + _ALIGNMENT))()
        self._at = -(-ctypes.addressof(self._memory) // _ALIGNMENT) * _ALIGNMENT
        addresses = [self._at + parameter.offset for parameter in kernel.parameters]
        self._pointers = (ctypes.c_void_p * len(addresses))(*addresses)
        for kind, value, address in zip(
            types or parameter_types(meta), flat, addresses, strict=True
        ):
            data = _pack(kind, value, meta)
            ctypes.memmove(address, data, len(data))

    @property
    def address(self) -> int:
        """Address of the array of pointers, one for each parameter."""
        return ctypes.addressof(self._pointers)

    def whole_number(self, index: int) -> Any:
        """Parameter `index`, an i32, as a number whose `value` can be set between launches."""
        return ctypes.c_int32.from_address(self._pointers[index] or 0)

    def data(self) -> bytes:
        """The parameter buffer as the kernel sees it."""
        return ctypes.string_at(self._at, self._size)


def _ordered(meta: KernelMeta, values: Values) -> list[Value]:
    """Values in the order of the arguments."""
    names = [name for name, _ in meta.arguments]
    if isinstance(values, Mapping):
        if set(values) != set(names):
            wrong = sorted(set(values) ^ set(names))
            raise _refuse(meta, f"arguments {names} do not match: {', '.join(wrong)}")
        return [values[name] for name in names]
    if len(values) != len(names):
        raise _refuse(meta, f"{len(values)} values for {len(names)} arguments {names}")
    return list(values)


def _refuse(meta: KernelMeta, what: str) -> ArtifactError:
    return ArtifactError(
        f"kernel {meta.function} cannot be launched: {what}",
        where=meta.key[:12],
        hint="plan and kernels are of different compiles?",
    )


def _flatten(meta: KernelMeta, values: list[Value]) -> list[Any]:
    """One value for each parameter; pointers as numbers, checked for alignment."""
    flat: list[Any] = []
    for (name, kind), value in zip(meta.arguments, values, strict=True):
        if rank := _rank(kind):
            flat += _descriptor(meta, name, value, rank)
            continue
        item = value.data_ptr() if kind.startswith("*") and isinstance(value, HasPointer) else value
        if name in meta.aligned and isinstance(item, int) and item % 16:
            raise _refuse(meta, f"{name} is {item}, not divisible by 16")
        flat.append(item)
    return flat


def _descriptor(meta: KernelMeta, name: str, value: Value, rank: int) -> list[Any]:
    if not isinstance(value, TensorMap) or len(value.shape) != rank or len(value.strides) != rank:
        raise _refuse(meta, f"{name} is no tensor map of {rank} dimensions")
    return [value.descriptor, *value.shape, *value.strides]


def _pack(kind: str, value: Any, meta: KernelMeta) -> bytes:
    """The bytes of one parameter. Raises ArtifactError for a value that its type cannot hold."""
    if kind == "map":
        if len(value) != TENSOR_MAP_BYTES:
            raise _refuse(meta, f"a tensor map of {len(value)} bytes")
        return value
    try:
        return struct.pack("<Q" if kind.startswith("*") else _FORMATS[kind], value)
    except (struct.error, OverflowError, TypeError):
        raise _refuse(meta, f"{value!r} is no {kind}") from None
