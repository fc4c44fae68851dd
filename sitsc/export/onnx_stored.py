"""Weights of an artifact as initializers: from the form of the kernels to plain matrices.

In: specs of the plan and a reader of stored buffers. Out: promises, made when the file is written.
int8 stays int8 with its scales; half precision stays as it is and is cast by the graph.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sitsc.core import weight_formats
from sitsc.core.weights import DTYPES, WeightSpec
from sitsc.export.onnx_builder import Builder, Promise

ReadStored = Callable[[WeightSpec], Tensor]


@dataclass(frozen=True, slots=True)
class Stored:
    """A weight of the plan as an argument of a call, and how its buffer is read."""

    spec: WeightSpec
    read: ReadStored

    def matrices(self, rows: int, columns: int) -> Tensor:
        """The buffer unpacked: [rows, columns], or [count, rows, columns] of experts."""
        buffer, kind = self.read(self.spec), self.spec.format
        if kind == "plain":
            return buffer
        if len(self.spec.shape) == 2:
            return weight_formats.unpack(buffer, rows, columns, kind)
        parts = buffer.split(weight_formats.num_blocks(rows))
        return torch.stack([weight_formats.unpack(part, rows, columns, kind) for part in parts])


def plain(b: Builder, weight: Stored) -> str:
    """A weight that is stored as it is."""
    spec = weight.spec
    promise = Promise(spec.name, DTYPES[spec.dtype], spec.shape, lambda: weight.read(spec))
    return b.promise(promise)


def matrix(
    b: Builder, weight: Stored, scale: Stored | None, rows: int, columns: int, *, turned: bool
) -> str:
    """A weight [rows, columns], or [columns, rows] when `turned`; with experts before.

    A matrix that is asked for both ways is stored once, as [rows, columns].
    """
    spec = weight.spec
    first = (*spec.shape[:-2], rows, columns)
    shape = (*first[:-2], columns, rows) if turned else first
    other = b.promises.get(spec.name)
    if other is not None and other.shape != shape:
        whole = matrix(b, weight, scale, rows, columns, turned=not turned)
        order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        return b.once(("turned", spec.name), lambda: b.transpose(whole, order))

    def make() -> Tensor:
        value = weight.matrices(rows, columns)
        return (value.transpose(-1, -2) if turned else value).contiguous()

    name = b.promise(Promise(spec.name, DTYPES[spec.dtype], shape, make))
    if scale is None:
        return name
    return b.once(("scaled", name), lambda: _scaled(b, name, scale, shape, turned=turned))


def _scaled(b: Builder, name: str, scale: Stored, shape: tuple[int, ...], *, turned: bool) -> str:
    """int8 times the scale of each output row."""
    rows = shape[-1] if turned else shape[-2]
    wide = (*shape[:-2], 1, rows) if turned else (*shape[:-2], rows, 1)
    count = torch.Size(shape[:-2]).numel()

    def make() -> Tensor:
        return scale.read(scale.spec).view(count, -1)[:, :rows].reshape(wide).contiguous()

    factors = b.promise(Promise(scale.spec.name, torch.float32, wide, make))
    return b.node("Mul", b.cast(name, torch.float32), factors)
