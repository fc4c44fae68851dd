"""Indices through views: where an element of a view stands in its source, as texts.

For views of values that have no place because they are computed inside of a kernel.
"""

import operator
from typing import Any

from sitsc.passes.cost import Sizes
from sitsc.passes.cuda_refs import is_view
from sitsc.passes.fxutil import arguments, is_op, tensor

Node = Any
Index = tuple[str, ...]


def view_index(node: Node, index: Index, sizes: Sizes) -> tuple[Node, Index] | None:
    """(source, index in it) of an element of a view; None for what is none."""
    if node.target is operator.getitem:
        return _part(node, index)
    if not is_view(node):
        return None
    source, shape = node.args[0], tensor(node.args[0]).shape
    at, a = list(index), arguments(node)
    if is_op(node, "unsqueeze"):
        del at[a["dim"] % len(at)]
    elif is_op(node, "transpose"):
        one, two = a["dim0"] % len(at), a["dim1"] % len(at)
        at[one], at[two] = at[two], at[one]
    elif is_op(node, "permute"):
        at = [index[list(a["dims"]).index(dim)] for dim in range(len(shape))]
    elif is_op(node, "t"):
        at.reverse()
    elif is_op(node, "select"):
        dim = a["dim"] % len(shape)
        at.insert(dim, str(a["index"] % sizes.of(shape[dim])))
    elif is_op(node, "slice"):
        dim, start = a["dim"] % len(at), a["start"] or 0
        start += sizes.of(shape[dim]) if start < 0 else 0
        step = f"{at[dim]} * {a['step']}" if a["step"] != 1 else at[dim]
        at[dim] = f"({step} + {start})" if start else f"({step})"
    elif is_op(node, "expand"):
        at = at[len(at) - len(shape) :]
        at = ["0" if _is_one(size) else i for i, size in zip(at, shape, strict=True)]
    elif is_op(node, "reshape", "view", "_unsafe_view", "squeeze"):
        at = list(_reshaped(index, tuple(tensor(node).shape), tuple(shape), sizes))
    elif not is_op(node, "alias", "detach"):
        return None
    return source, tuple(at)


def _part(node: Node, index: Index) -> tuple[Node, Index] | None:
    """An element of one part of a split."""
    split, which = node.args
    if not is_view(split):
        return None
    dim = arguments(split).get("dim", 0) % len(index)
    parts = split.meta["val"]
    start = sum(part.shape[dim] for part in parts[:which])
    at = list(index)
    at[dim] = f"({at[dim]} + {start})" if start else at[dim]
    return split.args[0], tuple(at)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _reshaped(
    index: Index, new: tuple[Any, ...], old: tuple[Any, ...], sizes: Sizes
) -> tuple[str, ...]:
    """The index in sizes `old` of an element at `index` in sizes `new`, in the same order.

    Sizes are taken in the smallest groups of equal products, so that sizes which stay keep their
    text.
    """
    at = ["0"] * len(old)
    left = [d for d, size in enumerate(old) if not _is_one(size)]
    right = [d for d, size in enumerate(new) if not _is_one(size)]
    while left or right:
        here, there = [left.pop(0)], [right.pop(0)]
        a, b = sizes.of(old[here[0]]), sizes.of(new[there[0]])
        while a != b:
            if a < b:
                here.append(left.pop(0))
                a *= sizes.of(old[here[-1]])
            else:
                there.append(right.pop(0))
                b *= sizes.of(new[there[-1]])
        _regroup(at, here, there, index, new, old, sizes)
    return tuple(at)


def _regroup(
    at: list[str],
    here: list[int],
    there: list[int],
    index: Index,
    new: tuple[Any, ...],
    old: tuple[Any, ...],
    sizes: Sizes,
) -> None:
    """The texts of one group: the place in it, taken apart again."""
    place, step = [], 1
    for dim in reversed(there):
        place.append(f"{index[dim]} * {step}" if step != 1 else index[dim])
        step *= sizes.of(new[dim])
    whole = "(" + " + ".join(reversed(place)) + ")" if len(place) > 1 else place[0]
    if len(here) == 1:
        at[here[0]] = whole
        return
    step = 1
    for dim in reversed(here):
        text = f"({whole} // {step})" if step != 1 else whole
        at[dim] = f"({text} % {sizes.of(old[dim])})" if dim != here[0] else text
        step *= sizes.of(old[dim])
