"""Elementwise kernels from small parts of the graph: a value and all that is inlined in it.

In: a node, where its leaves lie, sizes. Out: a `Pointwise` and the places that it reads. Every
operator computes in fp32 and rounds to the dtype that the graph gives it; indices are texts of t
(the row of the step) and i0, i1 … (its other dimensions).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.kernels import Pointwise
from sitsc.core.weights import dtype_name
from sitsc.passes.cost import Sizes
from sitsc.passes.cuda_refs import Ref
from sitsc.passes.cuda_values import CASTS, ELEMENTWISE, is_selection
from sitsc.passes.cuda_views import view_index
from sitsc.passes.fxutil import arguments, is_op, module_path, tensor

Node = Any
Index = tuple[str, ...]
Part = tuple[Node, Callable[[Index], Index], int]


def unsupported(node: Node, why: str = "") -> UnsupportedModelError:
    """The error of a call that no kernel computes."""
    schema = getattr(node.target, "_schema", None)
    name = schema.name.replace("::", ".") if schema else str(node.target)
    what = f"operator {name} has no CUDA kernel" + (f" {why}" if why else "")
    return UnsupportedModelError(what, where=module_path(node), hint="compile for --target cpu")


@dataclass(slots=True)
class Emitter:
    """Writes the lines of one kernel; `place` gives the Ref of a stored value, else None.

    With `every_row` the rows that need logits are all rows, in order.
    """

    place: Callable[[Node], Ref | None]
    sizes: Sizes
    every_row: bool
    lines: list[tuple[str, ...]] = field(default_factory=list)
    inputs: list[Ref] = field(default_factory=list)
    loads: list[tuple[Ref, str, str]] = field(default_factory=list)
    known: dict[Any, str] = field(default_factory=dict)

    def value(self, node: Node, index: Index, mask: str = "") -> str:
        """The name of a value at an index; for numbers their text."""
        if not isinstance(node, fx.Node):
            return repr(node)
        key = (node, index, mask)
        if key not in self.known:
            ref = self.place(node)
            self.known[key] = (
                self.load(ref, index, mask) if ref is not None else self._call(node, index, mask)
            )
        return self.known[key]

    def line(self, *parts: str) -> str:
        """Write (operation, operands …, dtype); the name of its result."""
        name = f"v{len(self.lines)}"
        self.lines.append((name, *parts))
        return name

    def load(self, ref: Ref, index: Index, mask: str) -> str:
        """Write the load of an element; buffers are given whole, offsets are part of the index."""
        whole = Ref(ref.source, ref.buffer, ref.dtype)
        if whole not in self.inputs:
            self.inputs.append(whole)
        at = place_text(index, ref)
        self.loads.append((ref, at, mask))
        return self.line("load", str(self.inputs.index(whole)), at, mask, ref.dtype)

    def _call(self, node: Node, index: Index, mask: str) -> str:
        dtype = dtype_name(tensor(node).dtype) if _is_tensor(node) else ""
        if (moved := view_index(node, index, self.sizes)) is not None:
            return self.value(moved[0], moved[1], mask)
        if is_op(node, "cat", "stack"):
            return self._joined(node, index, mask, dtype)
        if is_op(node, "repeat_interleave"):
            return self._repeated(node, index, mask)
        if is_op(node, "rope"):
            return self._rope(node, index, mask, dtype)
        if is_selection(node):
            return self._selection(node, index, mask)
        if is_op(node, "index"):
            return self._lookup(node, index, mask)
        if is_op(node, *CASTS):
            return self.line("cast", self._operand(node, node.args[0], index, mask), dtype)
        return self._elementwise(node, index, mask, dtype)

    def _operand(self, node: Node, operand: Node, index: Index, mask: str) -> str:
        """An operand of an elementwise call, broadcast to its result."""
        if not isinstance(operand, fx.Node) or not _is_tensor(operand):
            return self.value(operand, (), mask)
        shape = tensor(operand).shape
        aligned = index[len(index) - len(shape) :]
        at = tuple("0" if _is_one(size) else i for i, size in zip(aligned, shape, strict=True))
        return self.value(operand, at, mask)

    def _elementwise(self, node: Node, index: Index, mask: str, dtype: str) -> str:
        name = next((n for op, n in ELEMENTWISE.items() if is_op(node, op)), None)
        if name is None:
            raise unsupported(node)
        a = arguments(node)
        if name == "gelu":
            name = "gelu_tanh" if a["approximate"] == "tanh" else "gelu_erf"
        if name == "glu":
            name = f"glu_{a['activation']}"
        if a.get("rounding_mode") is not None:
            raise unsupported(node, f"with rounding_mode {a['rounding_mode']}")
        given = [arg for arg in node.args if not isinstance(arg, str)]
        operands = [self._operand(node, arg, index, mask) for arg in given]
        if name == "pow" and not _is_number(given[1]):
            raise unsupported(node, "with a tensor as exponent")
        if a.get("alpha", 1) != 1:
            operands[1] = self.line("mul", operands[1], repr(a["alpha"]), "float32")
        return self.line(name, *operands, dtype)

    def _selection(self, node: Node, index: Index, mask: str) -> str:
        source, picks = node.args
        if self.every_row:
            return self.value(source, index, mask)
        dim = next(dim for dim, pick in enumerate(picks) if pick is not None)
        row = self.value(picks[dim], (index[dim],), mask)
        return self.value(source, (*index[:dim], row, *index[dim + 1 :]), mask)

    def _lookup(self, node: Node, index: Index, mask: str) -> str:
        table, rows = node.args[0], node.args[1]
        ref = self.place(table)
        if ref is None or len(rows) != 1 or rows[0] is None:
            raise unsupported(node)
        depth = tensor(rows[0]).dim()
        row = self.value(rows[0], index[:depth], mask)
        return self.value(table, (row, *index[depth:]), mask)

    def _repeated(self, node: Node, index: Index, mask: str) -> str:
        a = arguments(node)
        dim = a["dim"]
        if dim is None or not isinstance(a["repeats"], int):
            raise unsupported(node)
        at = list(index)
        at[dim % len(at)] = f"({at[dim % len(at)]} // {a['repeats']})"
        return self.value(node.args[0], tuple(at), mask)

    def _joined(self, node: Node, index: Index, mask: str, dtype: str) -> str:
        stacked = is_op(node, "stack")
        dim = arguments(node)["dim"] % len(index)
        parts: list[Part] = []
        for item in node.args[0]:
            size = 1 if stacked else tensor(item).shape[dim]
            if not isinstance(size, int):
                raise unsupported(node, "along the tokens of a step")
            parts.append((item, _drop(dim) if stacked else _keep, size))
        return self.choose(parts, index, dim, mask, dtype)

    def choose(self, parts: list[Part], index: Index, dim: int, mask: str, dtype: str) -> str:
        """Parts that stand one after another along a dimension; each is read where it stands."""
        low, out = 0, ""
        for item, change, size in parts:
            at = list(index)
            at[dim] = f"({index[dim]} - {low})" if low else index[dim]
            inside = f"({index[dim]} >= {low}) & ({index[dim]} < {low + size})"
            both = f"{mask} & {inside}" if mask else inside
            value = self.value(item, change(tuple(at)), both)
            out = self.line("select", inside, value, out, dtype) if out else value
            low += size
        return out

    def _rope(self, node: Node, index: Index, mask: str, dtype: str) -> str:
        """Rotary embedding; d of the rotated dimensions turns with its partner, others stay."""
        a = arguments(node)
        rotary, d = int(tensor(a["cos"]).shape[-1]), index[-1]
        turned = f"({d} < {rotary})"
        inside = f"{mask} & {turned}" if mask else turned
        half = a["style"] == "half"
        partner = f"(({d} + {rotary // 2}) % {rotary})" if half else f"({d} + 1 - {d} % 2 * 2)"
        negative = f"({d} < {rotary // 2})" if half else f"({d} % 2 == 0)"
        x = self.value(a["x"], index, mask)
        other = self.value(a["x"], (*index[:-1], partner), inside)
        minus = self.line("neg", other, "float32")
        other = self.line("select", negative, minus, other, "float32")
        at = (index[-2], d)
        cos, sin = (self.value(a[name], at, inside) for name in ("cos", "sin"))
        one = self.line("mul", x, cos, "float32")
        two = self.line("mul", other, sin, "float32")
        both = self.line("add", one, two, dtype)
        return self.line("select", turned, both, x, dtype)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _keep(index: Index) -> Index:
    return index


def _drop(dim: int) -> Callable[[Index], Index]:
    return lambda index: (*index[:dim], *index[dim + 1 :])


def place_text(index: Index, ref: Ref) -> str:
    """The element at an index of a value, counted from the start of its buffer."""
    pairs = zip(index, ref.strides, strict=True)
    terms = [f"{i} * {s}" if s != 1 else i for i, s in pairs if i != "0" and s]
    return " + ".join([*terms, *([str(ref.offset)] if ref.offset else [])]) or "0"


def row_index(shape: tuple[Any, ...]) -> tuple[Index, tuple[int, ...], int | None]:
    """Texts of the dimensions of a value, the sizes of those that are not rows, and the rows' one.

    Raises UnsupportedModelError for a value with two dimensions that depend on the step.
    """
    index, sizes, rows = [], [], None
    for dim, size in enumerate(shape):
        if not isinstance(size, int):
            if rows is not None:
                raise UnsupportedModelError("a value has two sizes that depend on the step")
            rows = dim
            index.append("t")
        elif size == 1:
            index.append("0")
        else:
            index.append(f"i{len(sizes)}")
            sizes.append(size)
    return tuple(index), tuple(sizes), rows


def program(
    emitter: Emitter, result: str, sizes: tuple[int, ...], out: Ref, index: Index, reduce: str = ""
) -> Pointwise:
    """The kernel of what an emitter wrote, with its result at `index` of `out`."""
    assert math.prod(sizes) > 0
    return Pointwise(
        sizes=sizes or (1,),
        inputs=tuple(ref.dtype for ref in emitter.inputs),
        lines=tuple(emitter.lines),
        result=result,
        out_dtype=out.dtype,
        out_index=place_text(index, out),
        reduce=reduce,
    )
