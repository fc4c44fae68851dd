"""Where a kernel may write over what is there: in place, or where the next layer expects a value.

A place is free when no kernel after the writer reads any of its elements.
"""

from typing import Any

from torch import fx

from sitsc.passes.cuda_launch import LaunchBuilder
from sitsc.passes.cuda_refs import Ref
from sitsc.passes.cuda_values import is_lazy
from sitsc.passes.fxutil import is_op, tensor

Node = Any


class InPlace(LaunchBuilder):
    """Chooses the places of results."""

    def reset(self) -> None:
        """Forget everything that was scheduled."""
        super().reset()
        self.carried: dict[Node, Node] = {}

    def destination(
        self, node: Node, reads: list[Ref], over: list[Node], *, strided: bool = False
    ) -> Ref:
        """The place for a node's value.

        Where the next layer expects it, or over one of `over`, whose elements the kernel reads only
        where it writes; `reads` is everything else that it reads. A new buffer otherwise. Kernels
        that write whole rows take no `strided` place.
        """
        wanted = [self.carried[node]] if node in self.carried else []
        for candidate in [*wanted, *over]:
            ref = self.resolve(candidate) if isinstance(candidate, fx.Node) else None
            if not isinstance(ref, Ref) or not self._fits(node, candidate, ref):
                continue
            if not strided and (ref.offset or not ref.contiguous):
                continue
            if any(other.buffer == ref.buffer for other in reads if other.source == "arena"):
                continue
            if self.free(ref, node):
                return self._own_over(node, ref)
        return self.new(node)

    def _own_over(self, node: Node, ref: Ref) -> Ref:
        """Write over a place; values of the whole buffer that were there are gone."""
        whole = [n for n in self.owners.get(ref.buffer, []) if self._covers(ref, n)]
        for old in whole:
            self.owners[ref.buffer].remove(old)
        return self.own(node, ref)

    def _covers(self, ref: Ref, old: Node) -> bool:
        place = self.resolve(old)
        return isinstance(place, Ref) and place.same_elements(ref)

    def _fits(self, node: Node, candidate: Node, ref: Ref) -> bool:
        same = tensor(candidate).dtype == tensor(node).dtype
        shapes = [[str(n) for n in tensor(x).shape if str(n) != "1"] for x in (node, candidate)]
        return same and shapes[0] == shapes[1] and ref.buffer in self.bytes

    def free(self, ref: Ref, node: Node) -> bool:
        """Whether nothing after `node` reads the elements of `ref`, as they are now."""
        if ref.source != "arena" or ref.buffer not in self.bytes:
            return False
        now = self.values.order[node]
        return not any(self._read_after(old, ref, now) for old in self.owners[ref.buffer])

    def _read_after(self, value: Node, ref: Ref, now: int) -> bool:
        place = self.resolve(value)
        if isinstance(place, Ref) and not _overlap(place, ref):
            return False
        for user in value.users:
            if self.values.passes_through(user):
                inside = self.resolve(user) is not None or not is_op(user, "reshape")
                late = self._read_after(user, ref, now) if inside else self._late(user, now)
            elif is_lazy(user) and not self.values.stored(user):
                late = self._late(user, now)
            else:
                late = self.values.order[user] > now
            if late:
                return True
        return False

    def _late(self, user: Node, now: int) -> bool:
        return self.values.last_read(user) > now


def _overlap(one: Ref, two: Ref) -> bool:
    """Whether two places of a buffer may share elements; columns are compared when rows agree."""
    if not one.shape or not two.shape:
        return True
    (row, low, high), (other, start, end) = _columns(one), _columns(two)
    if row != other or max(high, end) > row:
        return True
    return low < end and start < high


def _columns(ref: Ref) -> tuple[int, int, int]:
    """(row stride, first column, one past the last) of a place."""
    steps = sorted((s, n) for n, s in zip(ref.shape, ref.strides, strict=True) if n != 1)
    if not steps:
        return 1, 0, 2
    row = steps[-1][0]
    low = ref.offset % row
    return row, low, low + sum((n - 1) * s for s, n in steps[:-1]) + 1
