"""What slices and parts of splits take from the last dimension of a tensor, for matchers."""

import operator
from dataclasses import dataclass

from torch import fx

from sitsc.passes.fxutil import Node, arguments, is_op, tensor


@dataclass(frozen=True, slots=True)
class Range:
    """Elements start, start + step, … (before stop) of the last dimension of `source`."""

    source: Node
    start: int
    stop: int
    step: int


def last_dim(node: Node) -> int:
    """The index of the last dimension."""
    return tensor(node).dim() - 1


def last_slice(node: Node) -> Range | None:
    """What a slice or a part of a split takes, when it takes from the last dimension."""
    if _is_part(node):
        parts, index = node.args
        sizes = [part.shape[-1] for part in parts.meta["val"]]
        found = Range(parts.args[0], sum(sizes[:index]), sum(sizes[: index + 1]), 1)
        dim = arguments(parts)["dim"] % tensor(found.source).dim()
        return found if dim == last_dim(node) else None
    return _sliced(node) if is_op(node, "slice") else None


def _is_part(node: Node) -> bool:
    split = ("split", "chunk", "split_with_sizes")
    called = isinstance(node, fx.Node) and node.target is operator.getitem
    return called and is_op(node.args[0], *split)


def _sliced(node: Node) -> Range | None:
    args, source = arguments(node), node.args[0]
    whole = tensor(source).shape[-1]
    bounds = [args["start"], args["end"], args["step"]]
    known = isinstance(whole, int) and all(isinstance(b, int) or b is None for b in bounds)
    if not known or args["dim"] % tensor(source).dim() != last_dim(source):
        return None
    start, stop, _ = slice(*bounds).indices(whole)
    return Range(source, start, stop, args["step"])


def half(node: Node) -> tuple[Node, int, str] | None:
    """(source, 0 or 1, style) when a node is the low or high half, or the even or odd elements."""
    part = last_slice(node)
    if part is None:
        return None
    whole = tensor(part.source).shape[-1]
    if whole % 2:
        return None
    taken = (part.start, part.stop, part.step)
    for index in (0, 1):
        if taken == (index * whole // 2, (index + 1) * whole // 2, 1):
            return part.source, index, "half"
        if taken == (index, whole, 2):
            return part.source, index, "interleaved"
    return None
