"""Elementwise kernels in a schedule: stored values of the graph, copies, packed rows, epilogues."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from sitsc.core.kernels import Pointwise
from sitsc.core.weights import DTYPES, dtype_name
from sitsc.passes.cuda_inplace import InPlace
from sitsc.passes.cuda_launch import ALIGNMENT
from sitsc.passes.cuda_pointwise import Emitter, Index, Part, program, row_index, unsupported
from sitsc.passes.cuda_refs import Ref, packed
from sitsc.passes.fxutil import arguments, tensor

Node = Any


class Elementwise(InPlace):
    """Launches of elementwise kernels."""

    def emitter(self, root: Node | None = None) -> Emitter:
        """A kernel to write; the place of `root`, which it computes, is not read."""

        def place(node: Node) -> Ref | None:
            found = None if node is root else self.resolve(node)
            return found if isinstance(found, Ref) else None

        return Emitter(place, self.layout, self.step.kind == "decode")

    def store(self, node: Node) -> None:
        """Compute a value, and all that is inlined in it, into a place of its own."""
        emitter = self.emitter(node)
        index, sizes, _ = row_index(tuple(tensor(node).shape))
        result = emitter.value(node, index)
        same = [n for n in node.all_input_nodes if self._only_there(emitter, n, index)]
        reads = [ref for ref, _, _ in emitter.loads]
        over = [n for n in same if sum(r.buffer == self.place(n).buffer for r in reads) == 1]
        mine = {self.place(n).buffer for n in over}
        others = [ref for ref in reads if ref.buffer not in mine]
        out = self.destination(node, others, over, strided=True)
        self.pointwise(program(emitter, result, sizes, out, index), emitter.inputs, out, node)

    def _only_there(self, emitter: Emitter, node: Node, index: Index) -> bool:
        """Whether the kernel reads a stored value exactly where it writes its result."""
        ref = self.resolve(node)
        if not isinstance(ref, Ref) or len(ref.shape) != len(index):
            return False
        return (node, index, "") in emitter.known

    def reduce(self, node: Node, kind: str) -> None:
        """The mean or sum over the last dimension of a value."""
        a, x = arguments(node), node.args[0]
        last = tensor(x).dim() - 1
        if list(a.get("dim") or []) not in ([-1], [last]) or not isinstance(
            tensor(x).shape[-1], int
        ):
            raise unsupported(node, "over other dimensions than the last")
        emitter = self.emitter()
        index, sizes, _ = row_index(tuple(tensor(x).shape))
        if index[-1] == "0":
            sizes, index = (*sizes, 1), (*index[:-1], f"i{len(sizes)}")
        result = emitter.value(x, index)
        out = self.new(node)
        at = (*index[:-1], "0") if a.get("keepdim") else index[:-1]
        kernel = program(emitter, result, sizes, out, at, kind)
        self.pointwise(kernel, emitter.inputs, out, node)

    def pointwise(
        self, kernel: Pointwise, inputs: list[Ref], out: Ref, node: Node, *, counted: bool = True
    ) -> None:
        """Launch an elementwise kernel over the rows of a node."""
        info = self.provider.make("pointwise", program=kernel, count=self.count(node) or 1)
        bound = {f"in{n}_ptr": ref for n, ref in enumerate(inputs)}
        self.kernel(info, bound | {"y_ptr": replace(out, offset=0)}, node, counted=counted)

    def rows(self, node: Node) -> Ref:
        """The place of a value as whole rows, one after another; copied there when it is not."""
        ref = self.place(node)
        if ref.contiguous and ref.offset * DTYPES[ref.dtype].itemsize % ALIGNMENT == 0:
            return ref
        emitter = self.emitter()
        index, sizes, rows = row_index(tuple(tensor(node).shape))
        result = emitter.value(node, index)
        out = self.temporary("rows", self.shape_of(node), ref.dtype)
        out = replace(out, strides=packed(out.shape, rows))
        self.pointwise(
            program(emitter, result, sizes, out, index), emitter.inputs, out, node, counted=False
        )
        return out

    def copy(self, source: Node, out: Ref, node: Node) -> None:
        """Copy a stored value to another place of the same sizes."""
        emitter = self.emitter()
        index, sizes, _ = row_index(tuple(tensor(source).shape))
        result = emitter.value(source, index)
        kernel = program(emitter, result, sizes, out, index)
        self.pointwise(kernel, emitter.inputs, out, node, counted=False)

    def packed_row(self, node: Node, parts: list[Node]) -> Ref:
        """Values [tokens, heads, dim] side by side in rows of their own."""
        widths = [int(tensor(p).shape[1]) * int(tensor(p).shape[2]) for p in parts]
        row, emitter = sum(widths), self.emitter()
        rows = self.shape_of(parts[0])[0]
        out = self.temporary("row", (rows, row), dtype_name(tensor(parts[0]).dtype))
        chosen: list[Part] = [
            (part, _heads(int(tensor(part).shape[2])), width)
            for part, width in zip(parts, widths, strict=True)
        ]
        result = emitter.choose(chosen, ("t", "i0"), 1, "", out.dtype)
        kernel = program(emitter, result, (row,), out, ("t", "i0"))
        self.pointwise(kernel, emitter.inputs, out, node, counted=False)
        return out

    def epilogue(self, node: Node, a: dict[str, Any], wide: Ref, out: Ref) -> None:
        """What follows a product that the library left in fp32: bias, activation, residual."""
        emitter, width = self.emitter(), out.shape[-1]
        index: Index = ("t", "i0")
        flat = replace(wide, shape=(wide.shape[0], wide.shape[-1]), strides=(wide.shape[-1], 1))
        sides = [self._side(emitter, flat, a, side * width) for side in range(self._sides(a))]
        result = sides[0]
        if a["epilogue"] == "glu":
            result = emitter.line(f"glu_{a['activation']}", *sides, "float32")
        if a["residual"] is not None:
            ref = self.rows(a["residual"])
            at = replace(ref, shape=(1, 1), strides=(width, 1))
            result = emitter.line("add", result, emitter.load(at, index, ""), "float32")
        result = emitter.line("cast", result, out.dtype)
        flat_out = replace(out, shape=(out.shape[0], width), strides=(width, 1))
        kernel = program(emitter, result, (width,), flat_out, index)
        self.pointwise(kernel, emitter.inputs, flat_out, node, counted=False)

    def _sides(self, a: dict[str, Any]) -> int:
        return 2 if a["epilogue"] == "glu" else 1

    def _side(self, emitter: Emitter, wide: Ref, a: dict[str, Any], start: int) -> str:
        at = f"(i0 + {start})" if start else "i0"
        value = emitter.load(wide, ("t", at), "")
        bias = self.place(a["bias"])
        return emitter.line("add", value, emitter.load(bias, (at,), ""), "float32")


def _heads(dim: int) -> Any:
    """The index [row, head, d] of column c."""
    return lambda index: (index[0], f"({index[1]} // {dim})", f"({index[1]} % {dim})")


def constant(node: Node) -> float | None:
    """The number that a constant without dimensions holds, or a number itself; else None."""
    if isinstance(node, (int, float)):
        return float(node)
    spec = node.meta.get("weight") if isinstance(node, fx.Node) else None
    if spec is None or spec.role != "constant" or spec.shape not in ((), (1,)):
        return None
    raw = bytearray(bytes.fromhex(spec.data))
    return float(torch.frombuffer(raw, dtype=DTYPES[spec.dtype])[0])
