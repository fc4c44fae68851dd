"""Rules of views: how ranges of one dimension go through reshape, slice, split and the like.

A rule puts what stands for its call on a rank and returns the layout. Sums of ranks (`Partial`) go
through every view. What no range can describe is made whole first.
"""

import operator
from typing import Any

from torch import fx

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
    """Where the ranges of a dimension are after a reshape: moved, merged or split."""
    old, new = ([str(s) for s in tensor(n).shape] for n in (node.args[0], node))
    dim, size = layout.dim, sizes_of(node.args[0])[layout.dim]
    low = _agree(old[:dim], new)
    high = _agree(old[dim + 1 :][::-1], new[::-1])
    if low is None or high is None or low + high > len(new):
        return _mixed(node, layout)
    middle = list(range(low, len(new) - high))
    sizes = [sizes_of(node)[i] for i in middle]
    real = [(i, s) for i, s in zip(middle, sizes, strict=True) if s != 1]
    if len(real) == 1 and real[0][1] == size:
        return layout.at(real[0][0])
    if len(real) == 2 and real[0][1] * real[1][1] == size:
        (outer, count), (inner, each) = real
        if (held := divided(layout.held, each)) is not None:
            return Sharded(outer, held)
        held = folded(layout.held, count, each)
        return None if held is None else Sharded(inner, held)
    return None


def _agree(sizes: list[str], of: list[str]) -> int | None:
    """How many leading sizes of `of` hold the same elements as `sizes`, ones aside."""
    place = 0
    for size in sizes:
        if size == "1":
            continue
        while place < len(of) and of[place] == "1":
            place += 1
        if place == len(of) or of[place] != size:
            return None
        place += 1
    return place


def _mixed(node: Node, layout: Sharded) -> Sharded | None:
    """Ranges of one of two dimensions that are merged."""
    old, new = sizes_of(node.args[0]), sizes_of(node)
    for first in (layout.dim, layout.dim - 1):
        if first < 0 or first + 1 >= len(old):
            continue
        outer, inner = old[first], old[first + 1]
        before_, after = old[:first], old[first + 2 :]
        wanted = [s for s in (*before_, outer * inner, *after) if s != 1]
        if wanted != [s for s in new if s != 1] or 1 in (outer, inner):
            continue
        place = [i for i, s in enumerate(new) if s == outer * inner]
        place = [
            i for i in place if [s for s in new[:i] if s != 1] == [s for s in before_ if s != 1]
        ]
        if len(place) != 1:
            continue
        if first == layout.dim:
            return Sharded(place[0], merged(layout.held, inner))
        return Sharded(place[0], repeated(layout.held, outer, inner))
    return None


def expand(values: Values, node: Node, columns: Any) -> Layout:
    """Broadcasting of other dimensions."""
    layout = values.layout(node.args[0])
    if not isinstance(layout, Sharded):
        return values.plain(node)
    shape = list(values.mapped(node.args[1]))
    dim = layout.dim + len(shape) - tensor(node.args[0]).dim()
    shape[dim] = layout.local
    return _again(values, node, layout.at(dim), (values.local(node.args[0]), shape))


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
    return part[1]


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
    found, sizes, start = [], [], 0
    for part in node.meta["val"]:
        stop = start + int(part.shape[layout.dim])
        held = clipped(layout.held, start, stop)
        if held is None or before(layout.held, start) != sum(sizes):
            return values.plain(node)
        found.append(Sharded(layout.dim, held))
        sizes.append(found[-1].local)
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
