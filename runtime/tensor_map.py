"""Tensor descriptors: how the copy engine of a GPU (sm_90 and later) finds the tiles of a tensor.

In: an address, sizes and strides, and the tile layout that the compiler chose. Out: the descriptor
that a kernel takes by value. The driver encodes it; nothing is launched.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sitsc.core.errors import ArtifactError
from sitsc.runtime import cuda_driver
from sitsc.runtime.kernel_parameters import HasPointer, TensorMap

# Element types: the compiler writes the number that kernels use, the driver wants its own.
_DRIVER_TYPES = {8: 10, 9: 8, 10: 9}
_ALIGNMENT = 16
_MOST_DIMENSIONS = 5


def encode_tensor_map(
    name: str,
    layout: Mapping[str, Any],
    base: int | HasPointer,
    shape: Sequence[int],
    strides: Sequence[int],
) -> TensorMap:
    """A tensor map of `shape` and `strides` (elements, slowest dimension first).

    The last stride must be 1, address and other strides divisible by 16 bytes; reads outside give
    zeros. Raises ArtifactError for what does not fit, DeviceError without a driver.
    """
    if layout.get("fp4_padded") or layout.get("is_im2col"):
        raise ArtifactError(f"{name} is a padded 4-bit or an im2col tensor map: not supported")
    address = base.data_ptr() if isinstance(base, HasPointer) else base
    box, element = list(layout["block_size"]), int(layout["elem_size"])
    _check(name, address, shape, [stride * element for stride in strides], len(box), element)
    driver = cuda_driver.bindings()
    kind = _DRIVER_TYPES.get(layout["elem_type"], layout["elem_type"])
    encoded = cuda_driver.call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType(kind),
        len(box),
        address,
        [driver.cuuint64_t(size) for size in reversed(shape)],
        [driver.cuuint64_t(stride * element) for stride in reversed(strides[:-1])],
        [driver.cuuint32_t(size) for size in reversed(box)],
        [driver.cuuint32_t(1)] * len(box),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle(layout["swizzle"]),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    words = [int(word) for word in encoded.opaque]
    data = b"".join(word.to_bytes(8, "little") for word in words)
    return TensorMap(data, tuple(shape), tuple(strides))


def _check(
    name: str,
    address: int,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    rank: int,
    element_bytes: int,
) -> None:
    """What the copy engine demands, told before the driver answers with a bare error."""
    if not len(shape) == len(strides_bytes) == rank <= _MOST_DIMENSIONS:
        raise ArtifactError(f"{name} needs {rank} sizes and strides")
    if strides_bytes[-1] != element_bytes or min(shape) < 1:
        raise ArtifactError(f"{name} must be dense in its last dimension, and not empty")
    if any(number % _ALIGNMENT for number in (address, *strides_bytes[:-1])):
        raise ArtifactError(f"{name} must have address and strides divisible by {_ALIGNMENT} bytes")
