"""Rules of views: how ranges of one dimension go through reshape, slice, split and the like.

A rule puts what stands for its call on a rank and returns the layout. Sums of ranks (`Partial`) go
through every view. What no range can describe is made whole first.
"""

import math
import operator
from typing import Any

from torch import fx

from sitsc.core.ranges import Ranges
from sitsc.passes.fxutil import Node, arguments, aten, is_op, tensor
from sitsc.passes.shard_layout import (
    Layout,
    Partial,
    Sharded,
    before,
    clipped,
    divided,
    folded,
    merged,
    repeated,
    unless_whole,
)
from sitsc.passes.shard_names import sizes_of
from sitsc.passes.shard_values import Values


def _of_sum(values: Values, node: Node, layout: Partial) -> Layout:
    """A view of a sum is the sum of views, unless something is to be added to it."""
    if layout.rest or any(values.layout(a) is not None for a in node.all_input_nodes[1:]):
        return values.plain(node)
    values.put(node, values.emit(node.target, values.mapped(node.args), **node.kwargs))
    return Partial()


def _again(values: Values, node: Node, layout: Layout, args: Any = None) -> Layout:
    """The same call over parts."""
    args = values.mapped(node.args) if args is None else args
    values.put(node, values.emit(node.target, args, **values.mapped(node.kwargs)))
    return layout


def reshape(values: Values, node: Node, columns: Any) -> Layout:
    """Reshape, flatten, squeeze and unsqueeze, all emitted as reshapes."""
    layout = values.layout(node.args[0])
    if isinstance(layout, Partial):
        return _of_sum(values, node, layout)
    found = _reshaped(node, layout)
    if found is None:
        return values.plain(node)
    if is_op(node, "reshape", "view"):
        shape = list(values.mapped(node.args[1]))
        if isinstance(shape[found.dim], int) and shape[found.dim] != -1:
            shape[found.dim] = found.local
        return _again(values, node, found, (values.local(node.args[0]), shape))
    if is_op(node, "unsqueeze", "squeeze"):
        return _again(values, node, found)
    return values.plain(node)


def _reshaped(node: Node, layout: Sharded) -> Sharded | None:
    """Where the ranges of a dimension are after a reshape: moved, merged with others or split."""
    source = node.args[0]
    old, new = ([str(s) for s in tensor(n).shape] for n in (source, node))
    for before_, after in _groups(old, new):
        if layout.dim in before_:
            sizes, place = sizes_of(source), before_.index(layout.dim)
            outer, inner = (
                math.prod(sizes[d] for d in some)
                for some in (before_[:place], before_[place + 1 :])
            )
            flat = repeated(merged(layout.held, inner), outer, sizes[layout.dim] * inner)
            return _split(flat, after, [sizes_of(node)[d] for d in after])
    return None


def _split(flat: tuple[Ranges, ...], dims: list[int], sizes: list[int]) -> Sharded | None:
    """The one of `dims` whose ranges are those of the dimension that is split into them."""
    for place, dim in enumerate(dims):
        outer, inner = math.prod(sizes[:place]), math.prod(sizes[place + 1 :])
        parts = folded(flat, outer, sizes[place] * inner)
        held = None if parts is None else divided(parts, inner)
        if held is not None:
            return Sharded(dim, held)
    return None


def _groups(old: list[str], new: list[str]) -> list[tuple[list[int], list[int]]]:
    """Dimensions of both shapes that hold the same elements, ones aside; none where it is unclear.

    Free sizes stand alone.
    """
    left = [d for d, size in enumerate(old) if size != "1"]
    right = [d for d, size in enumerate(new) if size != "1"]
    found = []
    while left and right:
        one, two = [left.pop(0)], [right.pop(0)]
        names = (old[one[0]], new[two[0]])
        if names[0] != names[1]:
            if not all(name.isdigit() for name in names):
                return []
            while (a := _product(old, one)) != (b := _product(new, two)):
                side, rest, sizes = (one, left, old) if a < b else (two, right, new)
                if not rest or not sizes[rest[0]].isdigit():
                    return []
                side.append(rest.pop(0))
        found.append((one, two))
    return found if not left and not right else []


def _product(sizes: list[str], dims: list[int]) -> int:
    return math.prod(int(sizes[d]) for d in dims)


def expand(values: Values, node: Node, columns: Any) -> Layout:
    """Broadcasting of other dimensions."""
    layout = values.layout(node.args[0])
    if not isinstance(layout, Sharded):
        return values.plain(node)
    shape = list(values.mapped(node.args[1]))
    dim = layout.dim + len(shape) - tensor(node.args[0]).dim()
    shape[dim] = layout.local
    return _again(values, node, layout.at(dim), (values.local(node.args[0]), shape))


def paired(values: Values, node: Node, columns: Any) -> Layout:
    """Pairs of the last dimension as complex numbers, and back."""
    layout = values.layout(node.args[0])
    if not isinstance(layout, Sharded) or layout.dim >= tensor(node.args[0]).dim() - 1:
        return values.plain(node)
    return _again(values, node, layout)


def turned(values: Values, node: Node, columns: Any) -> Layout:
    """Transpose and permute."""
    layout = values.layout(node.args[0])
    if isinstance(layout, Partial):
        return _of_sum(values, node, layout)
    count = tensor(node).dim()
    order = list(range(count))
    if is_op(node, "permute"):
        order = [d % count for d in node.args[1]]
    else:
        a, b = (0, 1) if is_op(node, "t") else (d % count for d in node.args[1:])
        order[a], order[b] = order[b], order[a]
    return _again(values, node, layout.at(order.index(layout.dim)))


def select(values: Values, node: Node, columns: Any) -> Layout:
    """One element of another dimension."""
    layout = values.layout(node.args[0])
    if isinstance(layout, Partial):
        return _of_sum(values, node, layout)
    dim = node.args[1] % tensor(node.args[0]).dim()
    if dim == layout.dim:
        return values.plain(node)
    return _again(values, node, layout.at(layout.dim - int(dim < layout.dim)))


def slices(values: Values, node: Node, columns: Any) -> Layout:
    """A slice: of another dimension, or the same part of what each rank holds."""
    args, layout = arguments(node), values.layout(node.args[0])
    if isinstance(layout, Partial):
        return _of_sum(values, node, layout)
    if args["dim"] % tensor(node.args[0]).dim() != layout.dim:
        return _again(values, node, layout)
    bounds = (args["start"], args["end"], args["step"])
    if not all(b is None or isinstance(b, int) for b in bounds) or args["step"] != 1:
        return values.plain(node)
    start, stop, _ = slice(*bounds).indices(sizes_of(node.args[0])[layout.dim])
    part = _part(values, layout, values.local(node.args[0]), start, stop)
    if part is None:
        return values.plain(node)
    values.put(node, part[0])
    return unless_whole(part[1], stop - start)


def _part(
    values: Values, layout: Sharded, source: Node, start: int, stop: int
) -> tuple[fx.Node, Sharded] | None:
    held, first = clipped(layout.held, start, stop), before(layout.held, start)
    if held is None or first is None:
        return None
    new = Sharded(layout.dim, held)
    args = (source, layout.dim, first, first + new.local)
    return values.emit(aten.slice.Tensor, args), new


def split(values: Values, node: Node, columns: Any) -> Layout | list[Layout]:
    """Split and chunk; its layout is a list, one of each part."""
    source = node.args[0]
    layout, args = values.layout(source), arguments(node)
    if isinstance(layout, Partial):
        if layout.rest:
            return values.plain(node)
        values.put(node, values.emit(node.target, values.mapped(node.args), **node.kwargs))
        return [Partial() for _ in node.meta["val"]]
    if args["dim"] % tensor(source).dim() != layout.dim:
        values.put(node, values.emit(node.target, values.mapped(node.args), **node.kwargs))
        return [layout for _ in node.meta["val"]]
    found: list[Layout] = []
    sizes, start = [], 0
    for part in node.meta["val"]:
        stop = start + int(part.shape[layout.dim])
        held = clipped(layout.held, start, stop)
        if held is None or before(layout.held, start) != sum(sizes):
            return values.plain(node)
        one = Sharded(layout.dim, held)
        found.append(unless_whole(one, stop - start))
        sizes.append(one.local)
        start = stop
    if sum(sizes) != layout.local:
        return values.plain(node)
    whole = values.local(source)
    values.put(node, values.emit(aten.split_with_sizes.default, (whole, sizes, layout.dim)))
    return found


def getitem(values: Values, node: Node, columns: Any) -> Layout:
    """A part of a split."""
    parts, place = node.args
    layouts = values.layout(parts)
    values.put(node, values.emit(operator.getitem, (values.local(parts), place)))
    return layouts[place] if isinstance(layouts, list) else None


def index(values: Values, node: Node, columns: Any) -> Layout:
    """Rows chosen by one list of indices, of another dimension."""
    layout, chosen = values.layout(node.args[0]), node.args[1]
    lists = [d for d, item in enumerate(chosen) if item is not None]
    one = len(lists) == 1 and tensor(chosen[lists[0]]).dim() == 1
    if not one or any(values.layout(item) is not None for item in chosen if item is not None):
        return values.plain(node)
    if isinstance(layout, Partial):
        return _of_sum(values, node, layout)
    return values.plain(node) if layout.dim == lists[0] else _again(values, node, layout)
