"""One regime of a plan, bound: everything that it launches, in order, at sizes that may change.

In: a regime, loaded kernels, planned memory. Out: steps to call with a stream. Arguments and grids
are fixed once; new sizes rewrite only what depends on them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from sitsc.core.plan import Argument, Launch, LaunchGroup
from sitsc.runtime.cuda_driver import LaunchConfig
from sitsc.runtime.cuda_memory import CudaMemory
from sitsc.runtime.kernel_parameters import TensorMap
from sitsc.runtime.launcher import KernelImage, whole_grid

Step = Callable[[int], None]
Images = Callable[[str], KernelImage]
Sizes = dict[str, int]


class BoundGroups:
    """Launch groups bound to kernels and memory; `steps` run in order on one stream."""

    def __init__(
        self, groups: Iterable[LaunchGroup], images: Images, memory: CudaMemory, sizes: Sizes
    ) -> None:
        self._images, self._memory, self._sizes = images, memory, dict(sizes)
        self._numbers: list[tuple[str, Any]] = []
        self._grids: list[tuple[LaunchConfig, KernelImage, tuple[int | str, ...]]] = []
        self._products: list[_Product] = []
        self.steps: list[Step] = []
        for group in groups:
            self._group(group)

    def resize(self, sizes: Sizes) -> None:
        """Make the steps those of other sizes. Raises ArtifactError for grids that cannot be."""
        if sizes == self._sizes:
            return
        self._sizes = dict(sizes)
        for name, number in self._numbers:
            number.value = sizes[name]
        for config, image, grid in self._grids:
            config.regrid(whole_grid(_sized(grid, sizes), image.meta))
        for product in self._products:
            product.resize(sizes)

    def run(self, stream: int) -> None:
        """Launch everything; `stream` is torch's current one."""
        for step in self.steps:
            step(stream)

    def _group(self, group: LaunchGroup) -> None:
        layers: tuple[int | None, ...] = group.layers or (None,)
        bound = [self._launches(launch, layers) for launch in group.launches]
        for index in range(len(layers)):
            self.steps += [steps[index] for steps in bound]

    def _launches(self, launch: Launch, layers: tuple[int | None, ...]) -> list[Step]:
        """One launch in every layer of its group."""
        if launch.kind == "library":
            product = _Product(launch, self._memory, self._sizes)
            self._products.append(product)
            return [product.step(self._memory.weight(launch.arguments[1], n)) for n in layers]
        image = self._images(launch.kernel)
        config = image.configure(_sized(launch.grid, self._sizes), launch.dependent)
        if any(isinstance(size, str) for size in launch.grid):
            self._grids.append((config, image, launch.grid))
        return [self._kernel(launch, image, config, layer) for layer in layers]

    def _kernel(
        self, launch: Launch, image: KernelImage, config: LaunchConfig, layer: int | None
    ) -> Step:
        maps = image.map_arguments
        values = {
            a.name: self._map(image, a, layer) if a.name in maps else self._value(a, layer)
            for a in launch.arguments
        }
        grid = _sized(launch.grid, self._sizes)
        bound = image.bind(grid, values, config=config)
        for argument in launch.arguments:
            if argument.source == "size":
                index = image.parameter_index(argument.name)
                self._numbers.append((argument.buffer, bound.whole_number(index)))
        return bound.launch

    def _value(self, argument: Argument, layer: int | None) -> Any:
        if argument.source == "size":
            return self._sizes[argument.buffer]
        if argument.source == "scalar":
            assert argument.value is not None
            return int(argument.value) if argument.dtype.startswith("i") else argument.value
        return self._memory.address(argument, layer)

    def _map(self, image: KernelImage, argument: Argument, layer: int | None) -> TensorMap:
        """A dense tensor for the copy engine; its sizes are those of the bucket, never a step's."""
        shape = [int(size) for size in argument.shape]
        return image.tensor_map(argument.name, self._memory.address(argument, layer), shape)


class _Product:
    """A matrix product by the library, on torch's current stream: y (+)= x @ w.T."""

    def __init__(self, launch: Launch, memory: CudaMemory, sizes: Sizes) -> None:
        self._launch, self._memory = launch, memory
        self.resize(sizes)

    def resize(self, sizes: Sizes) -> None:
        """Views of x and y for these sizes."""
        x, _, y = self._launch.arguments
        self.x = self._memory.at(x, tuple(_sized(x.shape, sizes)))
        self.y = self._memory.at(y, tuple(_sized(y.shape, sizes)))

    def step(self, weight: Tensor) -> Step:
        """The product with one weight [rows, columns], for "mm_kn" [columns, rows]."""
        kernel = self._launch.kernel
        right, add = weight if kernel == "mm_kn" else weight.t(), kernel == "addmm"
        wide = self.y.dtype != self.x.dtype

        def multiply(stream: int) -> None:
            del stream  # torch's current one
            if add and wide:  # onto a float32 residual stream
                torch.ops.aten.addmm.dtype_out(self.y, self.x, right, torch.float32, out=self.y)
            elif add:
                torch.addmm(self.y, self.x, right, out=self.y)
            elif wide:  # logits: bfloat16 operands, fp32 result
                torch.ops.aten.mm.dtype_out(self.x, right, torch.float32, out=self.y)
            else:
                torch.mm(self.x, right, out=self.y)

        return multiply


def _sized(values: Iterable[int | str], sizes: Sizes) -> list[int]:
    return [sizes[value] if isinstance(value, str) else value for value in values]
