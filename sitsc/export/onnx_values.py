"""Values while an ONNX graph is written: tensors and sizes by name, with what is known of them.

Every value is computed twice on the meta device, for two sets of free sizes: what differs is free.
Half precision is computed in float32, so a value of it is written as one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)

# ONNX's numbers of element types.
ONNX_TYPES: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}


class UnwrittenError(Exception):
    """A call that has no ONNX form here; the text names the variant. Collected by the exporter."""


def computed(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of a type are computed in ONNX."""
    return torch.float32 if dtype in HALF else dtype


@dataclass(frozen=True, slots=True)
class Size:
    """An integer of the graph (int64, rank 0) by its name, and its value in both examples."""

    name: str
    examples: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the graph by its name, and its meta tensors in both examples."""

    name: str
    metas: tuple[Tensor, Tensor]

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return self.metas[0].dim()

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Sizes; None where one is free."""
        pairs = zip(self.metas[0].shape, self.metas[1].shape, strict=True)
        return tuple(int(one) if one == two else None for one, two in pairs)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which it is written."""
        return computed(self.metas[0].dtype)


def example(value: Any, which: int) -> Any:
    """An argument of a call, with meta tensors and numbers of one example for values."""
    if isinstance(value, Value):
        return value.metas[which]
    if isinstance(value, Size):
        return value.examples[which]
    if isinstance(value, (list, tuple)):
        return [example(item, which) for item in value]
    return value
