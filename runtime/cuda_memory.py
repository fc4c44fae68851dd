"""The allocations of a plan on one device, and addresses in them.

In: a plan and placed weights. Out: arena and KV pools, one allocation each, and the device address
that an argument of the plan means in a layer.
"""

import math

import torch
from torch import Tensor

from sitsc.core.layer_names import name_in_layer
from sitsc.core.plan import ArenaBuffer, Argument, Plan
from sitsc.core.weights import DTYPES


class CudaMemory:
    """Weights, arena and KV pools of one device."""

    def __init__(self, plan: Plan, weights: dict[str, Tensor], arena: Tensor | None = None) -> None:
        self.plan, self.weights = plan, weights
        if arena is None:
            arena = torch.zeros(plan.memory.arena_bytes, dtype=torch.uint8, device="cuda")
        self.arena = arena[: plan.memory.arena_bytes]
        self.pools = {
            g.name: torch.zeros(
                plan.memory.kv_pages * g.page_bytes, dtype=torch.uint8, device="cuda"
            )
            for g in plan.kv
        }
        self._buffers = {b.name: b for b in plan.memory.arena}
        self._places = {layer: i for g in plan.kv for i, layer in enumerate(g.layers)}

    def buffer(self, name: str) -> ArenaBuffer:
        """The plan of an arena buffer."""
        return self._buffers[name]

    def view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The first elements of an arena buffer."""
        buffer = self._buffers[name]
        return self._shaped(buffer.offset, buffer.dtype, shape)

    def at(self, argument: Argument, shape: tuple[int, ...]) -> Tensor:
        """An arena argument as a tensor of `shape`."""
        return self._shaped(argument.offset, argument.dtype, shape)

    def _shaped(self, offset: int, name: str, shape: tuple[int, ...]) -> Tensor:
        dtype = DTYPES[name]
        nbytes = math.prod(shape) * dtype.itemsize
        return self.arena[offset : offset + nbytes].view(dtype).view(shape)

    def weight(self, argument: Argument, layer: int | None) -> Tensor:
        """The weight that an argument means in a layer."""
        return self.weights[weight_name(argument, layer)]

    def address(self, argument: Argument, layer: int | None) -> int:
        """The device address that an argument means in a layer of its group."""
        place = 0 if layer is None else self._places.get(layer, 0)
        moved = argument.offset + place * argument.layer_stride
        if argument.source == "arena":
            return self.arena.data_ptr() + moved
        if argument.source == "kv":
            return self.pools[argument.buffer].data_ptr() + moved
        return self.weight(argument, layer).data_ptr() + moved


def weight_name(argument: Argument, layer: int | None) -> str:
    """The weight of an argument in a layer."""
    return name_in_layer(argument.buffer, layer)
