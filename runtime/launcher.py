"""Launching compiled kernels: load once, bind arguments once, launch with one driver call.

In: a cubin and its metadata. Out: launches on any stream, also one that a CUDA graph captures; load
and bind before the capture. Needs the driver and cuda-bindings, never a compiler.
"""

import math
from collections.abc import Sequence
from typing import Any

from sitsc.core.errors import ArtifactError
from sitsc.core.kernel_meta import KernelMeta
from sitsc.runtime import cuda_driver
from sitsc.runtime.cubin import CubinKernel
from sitsc.runtime.cuda_driver import (
    DRIVER_CARVEOUT,
    Device,
    LaunchConfig,
    LaunchShape,
    LoadedKernel,
    PreparedLaunch,
)
from sitsc.runtime.kernel_parameters import (
    HasPointer,
    ParameterBuffer,
    TensorMap,
    Values,
    check_layout,
    num_parameters,
    parameter_types,
)
from sitsc.runtime.tensor_map import encode_tensor_map

_GRID_LIMITS = (2**31 - 1, 65535, 65535)


class BoundLaunch:
    """A kernel with its grid and arguments; keeps alive what the arguments point to."""

    __slots__ = ("_kept", "_launch", "_parameters", "config", "kernel")

    def __init__(
        self, kernel: LoadedKernel, config: LaunchConfig, parameters: ParameterBuffer, kept: Any
    ) -> None:
        self.kernel, self.config = kernel, config
        self._parameters, self._kept = parameters, kept
        self._launch = PreparedLaunch(kernel, config, parameters.address)

    def launch(self, stream: int) -> None:
        """Launch on a stream, given by its handle. Raises DeviceError."""
        self._launch.submit(stream)

    def whole_number(self, index: int) -> Any:
        """Parameter `index`, an i32, as a number whose `value` can be set between launches."""
        return self._parameters.whole_number(index)


class KernelImage:
    """One kernel, loaded on the current device."""

    __slots__ = ("_layout", "_types", "kernel", "meta")

    def __init__(self, meta: KernelMeta, layout: CubinKernel, kernel: LoadedKernel) -> None:
        self.meta, self._layout, self.kernel = meta, layout, kernel
        self._types = parameter_types(meta)

    @classmethod
    def load(
        cls, cubin: bytes, meta: KernelMeta, device: Device, carveout: int = DRIVER_CARVEOUT
    ) -> "KernelImage":
        """Check and load a kernel on the current device.

        `carveout`: percent of on-chip memory wanted as shared memory. Kernels of one chain should
        ask for the same: a multiprocessor must drain before its split can change. Raises
        ArtifactError for a cubin that is damaged or not that of `meta`, TargetError for another
        architecture, DeviceError for a driver that is too old.
        """
        layout = check_layout(cubin, meta)
        if meta.profile_bytes:
            raise ArtifactError(f"kernel {meta.function} was built for a profiler")
        cuda_driver.require(device, meta.sm, layout.cuda_version, meta.shared_bytes)
        kernel = cuda_driver.load_kernel(cubin, meta.function, meta.shared_bytes, carveout)
        return cls(meta, layout, kernel)

    def parameter_index(self, argument: str) -> int:
        """Where an argument stands among the parameters: a tensor descriptor takes several."""
        index = 0
        for name, kind in self.meta.arguments:
            if name == argument:
                return index
            index += num_parameters(kind)
        raise ArtifactError(f"kernel {self.meta.function} has no argument {argument}")

    def scratch_bytes(self, grid: Sequence[int]) -> int:
        """Bytes of global memory that a launch over `grid` needs for itself."""
        x, y, z = whole_grid(grid, self.meta)
        return self.meta.scratch_bytes * self.meta.num_ctas * x * y * z

    def blocks_per_sm(self) -> int:
        """How many blocks one multiprocessor holds at a time."""
        threads = 32 * self.meta.num_warps
        return cuda_driver.blocks_per_sm(self.kernel, threads, self.meta.shared_bytes)

    @property
    def map_arguments(self) -> list[str]:
        """The arguments that are tensor descriptors, in order."""
        return [name for name, kind in self.meta.arguments if kind.startswith("tensordesc")]

    def tensor_map(
        self,
        argument: str,
        base: int | HasPointer,
        shape: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> TensorMap:
        """The value for a tensor-descriptor argument: `shape` and `strides` in elements.

        Without strides the tensor is dense.

        Raises ArtifactError for an argument that is none, and for addresses and strides that the
        copy engine cannot use. Whoever binds the result keeps `base` alive.
        """
        names = self.map_arguments
        if argument not in names or len(names) != len(self.meta.tensor_maps):
            raise ArtifactError(f"{argument} of {self.meta.function} is no tensor descriptor")
        layout = self.meta.tensor_maps[names.index(argument)]
        dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return encode_tensor_map(argument, layout, base, shape, strides or dense)

    def configure(self, grid: Sequence[int], dependent: bool | None = None) -> LaunchConfig:
        """Grid (1 to 3 sizes) and attributes of launches of this kernel.

        `dependent` False waits for the kernel before to end although this one was built to
        overlap it. Raises ArtifactError for a grid that cannot be.
        """
        meta = self.meta
        return LaunchConfig(
            LaunchShape(
                grid=whole_grid(grid, meta),
                threads=32 * meta.num_warps,
                shared_bytes=meta.shared_bytes,
                cluster=meta.num_ctas,
                dependent=meta.pdl if dependent is None else dependent and meta.pdl,
                cooperative=meta.cooperative,
            )
        )

    def bind(
        self,
        grid: Sequence[int],
        values: Values,
        *,
        scratch: int = 0,
        dependent: bool | None = None,
        config: LaunchConfig | None = None,
    ) -> BoundLaunch:
        """Fix grid (1 to 3 sizes) and arguments, in order or by name.

        Values are addresses on the device, objects with `data_ptr()`, or numbers. A `config` of
        this kernel is shared instead of a new one for `grid`. Raises ArtifactError naming what
        does not fit.
        """
        meta = self.meta
        if scratch % meta.scratch_align or (self.scratch_bytes(grid) and not scratch):
            need = self.scratch_bytes(grid)
            raise ArtifactError(f"kernel {meta.function} needs {need} bytes of scratch memory")
        parameters = ParameterBuffer(self._layout, meta, values, scratch, self._types)
        if config is None:
            config = self.configure(grid, dependent)
        return BoundLaunch(self.kernel, config, parameters, values)


def whole_grid(grid: Sequence[int], meta: KernelMeta) -> tuple[int, int, int]:
    """A grid as three sizes. Raises ArtifactError outside 1 to the limits of the hardware."""
    sizes = (*grid, 1, 1)[:3] if 1 <= len(grid) <= 3 else (0, 0, 0)
    if not all(0 < size <= most for size, most in zip(sizes, _GRID_LIMITS, strict=True)):
        raise ArtifactError(f"kernel {meta.function} cannot have the grid {tuple(grid)}")
    return sizes[0], sizes[1], sizes[2]
