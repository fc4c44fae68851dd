"""Rules of the operators that compute: linear layers, norms, attention, the embedding.

A rule puts what stands for its call on a rank and returns the layout of that.
"""

from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from sitsc.core.ops.collectives import TP
from sitsc.passes.fxutil import (
    Node,
    arguments,
    aten,
    is_op,
    ops,
    same_shape,
    tensor,
    weight_of,
)
from sitsc.passes.shard_demand import linear_input, linear_weight
from sitsc.passes.shard_layout import Layout, Partial, Sharded, even, kv_heads, merged, vocabulary
from sitsc.passes.shard_names import sizes_of
from sitsc.passes.shard_values import Values, is_parameter


def elementwise(values: Values, node: Node, columns: Any) -> Layout:
    """All operands as the first cut one lies; sums of ranks where the operator is linear."""
    inputs = node.all_input_nodes
    if any(isinstance(values.layout(item), Partial) for item in inputs):
        found = _of_sums(values, node)
        if found is not None:
            return found
    for item in inputs:
        if isinstance(values.layout(item), Partial):
            values.whole(item)
    dims = tensor(node).dim()
    cut = {}
    for item in inputs:
        layout = values.layout(item)
        if isinstance(layout, Sharded):
            cut[item] = layout.at(layout.dim + dims - tensor(item).dim())
    if not cut:
        return values.plain(node)
    layout = next(iter(cut.values()))
    if any(other != layout for other in cut.values()):
        return values.plain(node)

    def local(item: Any) -> Any:
        if not isinstance(item, fx.Node) or item in cut:
            return values.local(item)
        return _aligned(values, item, layout, dims)

    args, kwargs = map_aggregate((node.args, dict(node.kwargs)), local)
    values.put(node, values.emit(node.target, args, **kwargs))
    return layout


def _aligned(values: Values, item: Node, layout: Sharded, dims: int) -> Node:
    """A whole operand as it goes with cut ones: cut too where it is not broadcast."""
    if not isinstance(item.meta.get("val"), torch.Tensor):
        return values.local(item)
    place = layout.dim - (dims - tensor(item).dim())
    if place < 0 or sizes_of(item)[place] == 1:
        return values.whole(item)
    return values.cut(item, layout.at(place))


def _of_sums(values: Values, node: Node) -> Layout:
    """Sums of ranks through a linear operator; None where it is not one."""
    if is_op(node, "add") and arguments(node)["alpha"] == 1 and len(node.all_input_nodes) == 2:
        return _added(values, node)
    first, *others = node.all_input_nodes
    layouts = [values.layout(item) for item in (first, *others)]
    product = is_op(node, "mul") and sum(layout is None for layout in layouts) == len(others)
    scaled = is_op(node, "div", "neg") and layouts[0] is not None and not any(layouts[1:])
    if is_op(node, "div") and (node.args[0] is not first or arguments(node).get("rounding_mode")):
        return None
    sums = [layout for layout in layouts if isinstance(layout, Partial)]
    if not (product or scaled) or any(layout.rest for layout in sums) or len(sums) != 1:
        return None
    if len([a for a in node.args if isinstance(a, fx.Node)]) != len(layouts):
        return None  # a square is no linear operator
    values.put(node, values.emit(node.target, values.mapped(node.args), **node.kwargs))
    return Partial()


def _added(values: Values, node: Node) -> Layout:
    """a + b: sums of both ranks' parts, or a value to add once the sum is there.

    It waits where the next addition may bring another sum: one collective for both.
    """
    one, two = node.args[:2]
    if one is two or not same_shape(one, two):
        return None
    layouts = [values.layout(item) for item in (one, two)]
    if any(isinstance(layout, Sharded) for layout in layouts):
        return None
    rest = tuple(r for layout in layouts if isinstance(layout, Partial) for r in layout.rest)
    if all(isinstance(layout, Partial) for layout in layouts):
        pair = tuple(values.local(item) for item in (one, two))
        values.put(node, values.emit(node.target, pair))
        return Partial(rest)
    if len(node.users) != 1 or not is_op(next(iter(node.users)), "add"):
        return None
    summed, plain = (one, two) if layouts[1] is None else (two, one)
    values.put(node, values.local(summed))
    return Partial((values.local(plain), *rest))


def linear(values: Values, node: Node, columns: Any) -> Layout:
    """By rows where its input is cut, by columns where that was chosen, else as it is."""
    x, weight, args = linear_input(node), linear_weight(node), arguments(node)
    bias = args["self"] if is_op(node, "addmm") else args["bias"]
    layout, last = values.layout(x), tensor(x).dim() - 1
    known = is_parameter(weight) and (bias is None or is_parameter(bias))
    scaled = is_op(node, "addmm") and (args["alpha"], args["beta"]) != (1, 1)
    if isinstance(layout, Partial):
        values.whole(x)
        layout = None
    if not known or scaled:
        return values.plain(node)
    inner, outer = (0, 1) if is_op(node, "addmm") else (1, 0)
    new: Layout = layout
    if isinstance(layout, Sharded) and layout.dim == last:
        if layout.repeats():
            return values.plain(node)
        weight = values.weight(weight, inner, layout.held)
        bias = None if bias is None else values.once(bias)
        new = Partial()
    elif layout is None and node in columns:
        held = columns[node]
        weight = values.weight(weight, outer, held)
        bias = None if bias is None else values.weight(bias, 0, held)
        new = Sharded(tensor(node).dim() - 1, held)
    parts = (values.local(x), weight)
    ordered = (bias, *parts) if is_op(node, "addmm") else (*parts, bias)
    values.put(node, values.emit(node.target, ordered))
    return new


def rms_norm(values: Values, node: Node, columns: Any) -> Layout:
    """Of heads as it is; over a width that is cut, with the sum of squares of all ranks."""
    x, weight, eps, offset = arguments(node).values()
    layout, last = values.layout(x), tensor(x).dim() - 1
    if not isinstance(layout, Sharded) or not is_op(node, "sitsc::rms_norm"):
        return values.plain(node)
    if layout.dim != last:
        values.put(node, values.emit(node.target, (values.local(x), weight, eps, offset)))
        return layout
    if offset or not (weight is None or is_parameter(weight)):
        return values.plain(node)
    part = None if weight is None else values.weight(weight, 0, layout.held)
    values.put(node, _over_ranks(values, values.local(x), part, eps, layout))
    return layout


def _over_ranks(values: Values, x: Node, weight: Node, eps: float, layout: Sharded) -> fx.Node:
    """As sitsc::rms_norm computes it; a width held several times is counted as often."""
    emit, dtype = values.emit, tensor(x).dtype
    wide = x
    if dtype != torch.float32:
        wide = emit(aten._to_copy.default, (x,), dtype=torch.float32)
    square = emit(aten.mul.Tensor, (wide, wide))
    total = emit(aten.sum.dim_IntList, (square, [-1], True))
    total = emit(ops.all_reduce.default, (total, None, TP))
    mean = emit(aten.div.Tensor, (total, layout.local * values.tp))
    scale = emit(aten.rsqrt.default, (emit(aten.add.Tensor, (mean, eps)),))
    out = emit(aten.mul.Tensor, (wide, scale))
    if dtype != torch.float32:
        out = emit(aten._to_copy.default, (out,), dtype=dtype)
    return out if weight is None else emit(aten.mul.Tensor, (out, weight))


def layer_norm(values: Values, node: Node, columns: Any) -> Layout:
    """Over a width that every rank has whole; weights of heads are cut with them."""
    x, layout = node.args[0], values.layout(node.args[0])
    dims = tensor(x).dim()
    if not is_op(node, "sitsc::layer_norm") or not isinstance(layout, Sharded):
        return values.plain(node)
    if layout.dim == dims - 1:
        return values.plain(node)
    args = arguments(node)
    weights = (
        None if item is None else _aligned(values, item, layout, dims)
        for item in (args["weight"], args["bias"])
    )
    values.put(node, values.emit(node.target, (values.local(x), *weights, args["eps"])))
    return layout


def reduction(values: Values, node: Node, columns: Any) -> Layout:
    """A mean, sum or softmax over dimensions that every rank has whole."""
    x, args = node.args[0], arguments(node)
    layout, count = values.layout(x), tensor(x).dim()
    given = args.get("dim")
    dims = [given] if isinstance(given, int) else given
    if not isinstance(layout, Sharded) or dims is None:
        return values.plain(node)
    over = {d % count for d in dims}
    if layout.dim in over:
        return values.plain(node)
    values.put(node, values.emit(node.target, values.mapped(node.args), **node.kwargs))
    gone = 0 if tensor(node).dim() == count else sum(d < layout.dim for d in over)
    return layout.at(layout.dim - gone)


def rope(values: Values, node: Node, columns: Any) -> Layout:
    """Rotation of heads [1, heads, tokens, dim]."""
    layout = values.layout(node.args[0])
    if not isinstance(layout, Sharded) or layout.dim != 1:
        return values.plain(node)
    tables = [values.whole(item) for item in node.args[1:3]]
    args = (values.local(node.args[0]), *tables, node.args[3])
    values.put(node, values.emit(node.target, args))
    return layout


def joined(values: Values, node: Node, columns: Any) -> Layout:
    """Concatenation along a dimension that every rank has whole."""
    items, dims = node.args[0], tensor(node).dim()
    along = arguments(node)["dim"] % dims
    cut = [values.layout(item) for item in items if isinstance(values.layout(item), Sharded)]
    partial = any(isinstance(values.layout(item), Partial) for item in items)
    if not cut or partial or any(other != cut[0] for other in cut) or cut[0].dim == along:
        return values.plain(node)
    parts = [values.cut(item, cut[0]) for item in items]
    values.put(node, values.emit(node.target, (parts, along)))
    return cut[0]


def stacked(values: Values, node: Node, columns: Any) -> Layout:
    """Values side by side along a new dimension, where all lie alike."""
    items, dims = node.args[0], tensor(node).dim()
    along = arguments(node)["dim"] % dims
    layouts = [values.layout(item) for item in items]
    first = layouts[0]
    if not isinstance(first, Sharded) or any(layout != first for layout in layouts):
        return values.plain(node)
    values.put(node, values.emit(node.target, ([values.local(item) for item in items], along)))
    return first.at(first.dim + (along <= first.dim))


def embedding(values: Values, node: Node, columns: Any) -> Layout:
    """The vocabulary cut into rows: each rank looks up the tokens it has, others give zeros."""
    args = arguments(node)
    table, ids = args["weight"], args["indices"]
    spec = weight_of(table)
    if spec is None or spec.role != "weight" or not _of_tokens(ids):
        return values.plain(node)
    held = vocabulary(spec.shape[0], values.tp)
    rows = held[0][0][1]
    emit = values.emit
    first = emit(aten.mul.Tensor, (values.rank(), rows))
    near = emit(aten.sub.Tensor, (values.local(ids), first))
    mine = emit(aten.clamp.default, (near, 0, rows - 1))
    other = emit(aten.ne.Tensor, (near, mine))
    out = emit(node.target, (values.weight(table, 0, held), mine))
    hide = emit(aten.unsqueeze.default, (other, -1))
    values.put(node, emit(aten.masked_fill.Scalar, (out, hide, 0)))
    return Partial()


def _of_tokens(node: Node) -> bool:
    """Whether indices are the token ids of the step."""
    while is_op(node, "unsqueeze", "reshape", "view"):
        node = node.args[0]
    return node.meta.get("input") == "token_ids"


def attention(values: Values, node: Node, columns: Any) -> Layout:
    """Heads by rank, each with a pool of its own KV heads."""
    args = arguments(node)
    heads, kv = (sizes_of(args[name])[1] for name in ("q", "k"))
    query, keys = even(heads, values.tp), kv_heads(kv, values.tp)
    width = sizes_of(node)[1] // heads
    given = dict(args)
    for name, held in (("q", query), ("k", keys), ("v", keys)):
        given[name] = values.cut(args[name], Sharded(1, held))
    if args["sinks"] is not None:
        given["sinks"] = values.cut(args["sinks"], Sharded(0, query))
    values.resize(args["kv"], 3, tensor(given["k"]).shape[1])
    rest = {k: values.whole(v) for k, v in given.items() if isinstance(v, fx.Node) and v is args[k]}
    values.put(node, values.emit(node.target, tuple((given | rest).values())))
    return Sharded(1, merged(query, width))
