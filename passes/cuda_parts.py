"""Sums that a linear layer leaves in parts: its reader adds them, no program waits for others.

In: linear layers whose columns several programs share, or products of the library in a float32
stream. A residual sum is completed by the norm that reads it first; the row [q | k | v] of a decode
step by attention. Where the first reader cannot do that, the linear layer adds its parts itself.
"""

import math
from dataclasses import dataclass
from typing import Any

from sitsc.core.errors import GraphError
from sitsc.core.kernels import KernelInfo
from sitsc.core.weights import DTYPES
from sitsc.passes.cuda_elementwise import Elementwise
from sitsc.passes.cuda_refs import Ref, packed, side_by_side, view
from sitsc.passes.cuda_values import is_selection
from sitsc.passes.fxutil import arguments, is_op, tensor

Node = Any
_WHOLE = 8  # elements, see codegen/cuda_ranks.py


@dataclass(frozen=True, slots=True)
class Sums:
    """A value that is `base` plus `count` sums `parts` [count, rows, columns], of every rank.

    Without a `base` it is the sums alone.
    """

    base: Ref | None
    parts: Ref
    count: int
    ranks: int = 1

    def same(self, other: "Sums") -> bool:
        """Whether a kernel that adds these also adds those."""
        same = (self.count, self.ranks) == (other.count, other.ranks)
        same = same and self.parts.dtype == other.parts.dtype
        same = same and self.parts.same_elements(other.parts)
        if self.base is None or other.base is None:
            return False
        return same and self.base.same_elements(other.base)


def whole_rows(node: Node) -> bool:
    """Whether rows are whole vectors: others are summed over ranks without norm and parts."""
    return tensor(node).shape[-1] % _WHOLE == 0


def in_parts(info: KernelInfo | None) -> bool:
    """Whether a kernel leaves its sums in parts."""
    return info is not None and any(name == "parts_ptr" for name, _ in info.arguments)


class PartOps(Elementwise):
    """Keeps track of values that are still in parts."""

    def reset(self) -> None:
        """Forget everything that was scheduled."""
        super().reset()
        self.waiting: dict[str, Sums] = {}
        self.row_parts: dict[str, int] = {}
        self.unsummed: dict[Node, Sums] = {}
        self.whole: set[Node] = set()
        self.following: dict[Node, Node] = {}

    def asked_for(
        self, node: Node, *, parts: bool, ahead: Node | None = None
    ) -> tuple[dict[str, Any], KernelInfo | None]:
        """The shape of a linear layer and the kernel that the provider gives for it.

        With `ahead`, the layer whose norm the kernel may make.
        """
        raise NotImplementedError

    def operands(self, node: Node, x: Ref) -> dict[str, Any]:
        """x and W of a linear layer, as pointers and as maps, and how many tokens there are."""
        weight = self.place(arguments(node)["weight"])
        found: dict[str, Any] = {"x_ptr": x, "w_ptr": weight, "num_tokens": self.count(node)}
        return found | {"x_map": x.rows(), "w_map": weight}

    # --- who may ------------------------------------------------------------------------------

    def takes_parts(self, node: Node) -> bool:
        """Whether the first reader of a linear layer can add its sums."""
        a = arguments(node)
        if a["bias"] is not None:
            return False
        if self.reduced(node):
            return not self.waiting and whole_rows(node)
        if a["epilogue"] == "residual":
            return node not in self.whole and not self.waiting and self.norm_first(node)
        return a["epilogue"] == "none" and self.step.kind == "decode" and self._only_row(node)

    def reduced(self, node: Node) -> bool:
        """Whether a linear layer is read by nothing but the sum over ranks."""
        users = list(node.users)
        return (
            len(users) == 1
            and is_op(users[0], "all_reduce")
            and arguments(node)["epilogue"] == "none"
            and arguments(node)["bias"] is None
        )

    def norm_first(self, node: Node) -> bool:
        """Whether a norm that can be a kernel of its own reads a value before all others."""
        readers = sorted(self.values.readers(node), key=self.values.order.__getitem__)
        if not readers or not is_op(readers[0], "fused_linear"):
            return False
        a = arguments(readers[0])
        if a["x"] is not node or a["prologue"] != "rms_norm" or a["residual"] is node:
            return False
        if is_op(node, "all_reduce"):
            return whole_rows(node)
        _, info = self.asked_for(readers[0], parts=False)
        return info is None or bool(info.tile.get("separate_norm"))

    def _only_row(self, node: Node) -> bool:
        """Whether only attention reads a value: q, k and v, side by side in its rows."""
        readers = self.values.readers(node)
        if len(readers) != 1 or not is_op(readers[0], "paged_attention"):
            return False
        shape, a = self.shape_of(node), arguments(readers[0])
        row = Ref("arena", "row", "float32", 0, shape, packed(shape, None))
        return side_by_side([self._seen(a[name], node, row) for name in ("q", "k", "v")])

    def _seen(self, value: Node, source: Node, place: Ref) -> Any:
        """Where a view of `source` is when that is at `place`."""
        if value is source:
            return place
        if not self.values.passes_through(value):
            return None
        before = self._seen(value.args[0], source, place)
        return before if before is None or is_selection(value) else view(value, before, self.layout)

    # --- leaving and adding -------------------------------------------------------------------

    def leave_parts(self, node: Node, info: KernelInfo, bound: dict[str, Any]) -> None:
        """Launch a linear kernel that leaves its sums, and remember who is to add them."""
        count, residual = info.tile["split"], arguments(node)["residual"]
        if self.reduced(node):
            parts = self._scratch(self.shape_of(node), count, "float32")
            self.kernel(info, bound | {"parts_ptr": parts}, node)
            self.unsummed[node] = Sums(None, parts, count, self.ranks)
            return
        if residual is None:
            row = self.new(node, parts=count)
            self.row_parts[row.buffer] = count
            self.kernel(info, bound | {"parts_ptr": row}, node)
            return
        out, sums = self._begun(node, bound["x_ptr"], count, "float32")
        self.kernel(info, bound | {"parts_ptr": sums.parts}, node)
        self.waiting[out.buffer] = sums

    def product_apart(self, node: Node, x: Ref, w: Ref, rows: int) -> bool:
        """A product of the library that the next norm adds to a float32 stream, if it can."""
        residual = arguments(node)["residual"]
        if tensor(residual).dtype != DTYPES["float32"] or not self.takes_parts(node):
            return False
        out, sums = self._begun(node, x, 1, "bfloat16")
        self.product(node, x, w, sums.parts, rows, kernel="mm")
        self.waiting[out.buffer] = sums
        return True

    def _begun(self, node: Node, x: Ref, count: int, dtype: str) -> tuple[Ref, Sums]:
        """The place of a residual sum, and what is to be added there."""
        residual = arguments(node)["residual"]
        base = self.rows(residual)
        out = self.destination(node, [x], [residual])
        return out, Sums(base, self._scratch(out.shape, count, dtype), count)

    def added(self, x: Ref) -> Sums | None:
        """What a norm that reads `x` has to add, once."""
        return self.waiting.pop(x.buffer, None)

    def kernel(
        self, info: KernelInfo, bound: dict[str, Any], node: Node, *, counted: bool = True
    ) -> None:
        """Launch a kernel. Raises GraphError when it reads what is in parts."""
        self._read(ref for ref in bound.values() if isinstance(ref, Ref))
        super().kernel(info, bound, node, counted=counted)

    def product(self, node: Node, x: Ref, w: Ref, y: Ref, rows: int, *, kernel: str) -> None:
        """A product by the library. Raises GraphError when it reads what is in parts."""
        self._read((x, y))
        super().product(node, x, w, y, rows, kernel=kernel)

    def _read(self, refs: Any) -> None:
        for ref in refs:
            if ref.source == "arena" and ref.buffer in self.waiting:
                raise GraphError(f"{ref.buffer} is read in parts", hint="report the model")

    def _scratch(self, given: tuple[int, ...], count: int, dtype: str) -> Ref:
        sums = math.prod(given) * count * DTYPES[dtype].itemsize // 4
        self.scratch["sums"] = max(self.scratch["sums"], sums)
        shape = (math.prod(given[:-1]), given[-1])
        return Ref("arena", "sums", dtype, 0, shape, packed(shape, None))

    # --- repeated layers ----------------------------------------------------------------------

    def embedded_parts(self, node: Node, out: Ref) -> Sums | None:
        """Parts of the value before repeated layers, as many as all of them add; set to zero."""
        theirs = self.following.get(node)
        if theirs is None or not is_op(theirs, "fused_linear") or not self.norm_first(node):
            return None
        if arguments(theirs)["epilogue"] != "residual" or not self.takes_parts(theirs):
            return None
        _, info = self.asked_for(theirs, parts=True)
        if info is not None and in_parts(info):
            count = info.tile["split"]
            return Sums(out, self._scratch(out.shape, count, "float32"), count)
        if info is None and tensor(theirs).dtype == DTYPES["float32"]:
            return Sums(out, self._scratch(out.shape, 1, "bfloat16"), 1)
        return None

    def begin_layers(self) -> dict[str, Sums]:
        """What the first of repeated layers has to add.

        Where it finds a value whole, so must the others: their kernels add the parts themselves.
        """
        for theirs, ours in self.carried.items():
            ref = self.resolve(ours)
            if isinstance(ref, Ref) and ref.buffer not in self.waiting:
                self.whole.add(theirs)
        return dict(self.waiting)

    def same_parts(self, before: dict[str, Sums]) -> bool:
        """Whether a later layer finds the same to add as the first."""
        after = self.waiting
        return before.keys() == after.keys() and all(before[k].same(after[k]) for k in before)
