"""Where every weight of a plan lies in one allocation, and its parts as tensors.

In: the weight specs of a plan, in order. Out: offsets, which are multiples of 64 bytes and the same
as in a packed weights file, and views of a block of bytes on any device.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from sitsc.core.packing import ALIGNMENT
from sitsc.core.weights import DTYPES, WeightSpec


@dataclass(frozen=True, slots=True)
class Placed:
    """One weight and its first byte in the allocation."""

    spec: WeightSpec
    offset: int


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All weights of a plan; `nbytes` is the whole allocation, equal to the plan's figure."""

    places: tuple[Placed, ...]
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[WeightSpec]) -> "WeightLayout":
        """One after the other, each aligned."""
        places, end = [], 0
        for spec in specs:
            places.append(Placed(spec, end))
            end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), end)

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """Every weight as a tensor of its stored shape; `block` is uint8 [nbytes]."""
        return {place.spec.name: view(block, place) for place in self.places}


def view(block: Tensor, place: Placed) -> Tensor:
    """One weight in the block, in its stored shape."""
    spec = place.spec
    raw = block[place.offset : place.offset + spec.nbytes]
    return raw.view(DTYPES[spec.dtype]).view(spec.stored_shape)


def allocate_block(layout: WeightLayout, device: str) -> Tensor:
    """The one allocation, uint8 [nbytes] of zeros: what runs before loading ends reads no NaN."""
    return torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
