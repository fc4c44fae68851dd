"""Building an ONNX graph: nodes with fresh names, constants once each, weights as promises.

What operators are written with. A weight is described at once and made when the file is written,
one at a time. Needs the package onnx.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from onnx import FunctionProto, NodeProto, TensorProto, helper
from torch import Tensor

from sitsc.export.onnx_values import HALF, ONNX_TYPES, Size, Value

OPSET = 18
Sizes = Sequence[int | Size]
INT64 = torch.int64


@dataclass(frozen=True, slots=True)
class Promise:
    """An initializer that is made when it is written: its type, shape and the function."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Builder:
    """Nodes and tensors of one graph. `functions` by name are what its nodes may call.

    With `inside`, of a function or of a loop in one: constants are nodes there.
    """

    def __init__(self, *, inside: bool = False, prefix: str = "") -> None:
        self.nodes: list[NodeProto] = []
        self.constants: dict[Any, TensorProto] = {}
        self.promises: dict[str, Promise] = {}
        self.functions: dict[str, FunctionProto] = {}
        self.inside, self.prefix, self._count = inside, prefix, 0
        self._memory: dict[Any, str] = {}

    def fresh(self, stem: str) -> str:
        """A name that nothing has."""
        self._count += 1
        return f"{self.prefix}{stem}_{self._count}"

    def node(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The output of a new node."""
        return self.nodes_of(op, inputs, 1, **attributes)[0]

    def nodes_of(self, op: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        """The `count` outputs of a new node."""
        outputs = [self.fresh(op) for _ in range(count)]
        self.nodes.append(
            helper.make_node(op, list(inputs), outputs, name=outputs[0], **attributes)
        )
        return outputs

    def named(self, op: str, output: str, *inputs: str, **attributes: Any) -> None:
        """A node whose output has a name given."""
        self.nodes.append(helper.make_node(op, list(inputs), [output], name=output, **attributes))

    def once(self, key: Any, make: Callable[[], str]) -> str:
        """What `make` gave the first time that it was asked for with this key."""
        if key not in self._memory:
            self._memory[key] = make()
        return self._memory[key]

    def constant(self, value: Any, dtype: torch.dtype = INT64) -> str:
        """A number, or a list of numbers, as a tensor."""
        found = torch.tensor(value, dtype=dtype)
        data = found.reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (dtype, tuple(found.shape), data)
        if key not in self.constants:
            name = f"{self.prefix}constant_{len(self.constants)}"
            made = helper.make_tensor(name, ONNX_TYPES[dtype], found.shape, data, raw=True)
            self.constants[key] = made
            if self.inside:
                self.named("Constant", name, value=made)
        return self.constants[key].name

    def real(self, value: float) -> str:
        """A float32 number."""
        return self.constant(value, torch.float32)

    def promise(self, promise: Promise) -> str:
        """A weight; of half precision cast to float32."""
        self.promises.setdefault(promise.name, promise)
        if promise.dtype not in HALF:
            return promise.name
        return self.once(("wide", promise.name), lambda: self.cast(promise.name, torch.float32))

    def cast(self, name: str, dtype: torch.dtype) -> str:
        """A value as another type."""
        return self.node("Cast", name, to=ONNX_TYPES[dtype])

    def operand(self, value: Any, dtype: torch.dtype) -> str:
        """A tensor, a size or a number as a tensor of a type."""
        if isinstance(value, Value):
            return value.name if value.dtype == dtype else self.cast(value.name, dtype)
        if isinstance(value, Size):
            return value.name if dtype == INT64 else self.cast(value.name, dtype)
        return self.constant(value, dtype)

    def sizes(self, values: Sequence[Any]) -> str:
        """A list of numbers and sizes as a tensor of rank 1."""
        if not any(isinstance(value, Size) for value in values):
            return self.constant([int(value) for value in values])
        axis = self.constant([0])
        parts = [
            self.node("Unsqueeze", v.name, axis) if isinstance(v, Size) else self.constant([int(v)])
            for v in values
        ]
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=0)

    def size(self, value: Value, axis: int) -> int | Size:
        """One size of a tensor."""
        axis %= value.rank
        known = value.shape[axis]
        if known is not None:
            return known
        name = self.once(
            ("size", value.name, axis),
            lambda: self.node("Squeeze", self.node("Shape", value.name, start=axis, end=axis + 1)),
        )
        return Size(name, (value.metas[0].shape[axis], value.metas[1].shape[axis]))

    def shape(self, value: Value) -> list[int | Size]:
        """All sizes of a tensor."""
        return [self.size(value, axis) for axis in range(value.rank)]

    def reshape(self, name: str, sizes: Sequence[Any]) -> str:
        """A tensor with other sizes, one of them -1 at most."""
        return self.node("Reshape", name, self.sizes(sizes))

    def transpose(self, name: str, order: Sequence[int]) -> str:
        """A tensor with its dimensions in another order."""
        return self.node("Transpose", name, perm=list(order))

    def slice(self, name: str, axis: int, start: Any, end: Any, step: int = 1) -> str:
        """Part of a tensor along an axis."""
        ends = (self.sizes([start]), self.sizes([end]))
        return self.node("Slice", name, *ends, self.constant([axis]), self.constant([step]))

    def unsqueeze(self, name: str, *axes: int) -> str:
        """A tensor with more dimensions of size one."""
        return self.node("Unsqueeze", name, self.constant(list(axes)))
