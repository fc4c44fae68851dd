"""Match rotary embedding: x·cos + rotate(x)·sin to one sitsc::rope.

Recognises the rotate-half form, the interleaved form (stack of pairs, flattened), the two halves
computed apart (which may be the even and the odd elements), and a rotated prefix concatenated with
the rest. cos and sin become [tokens, rotary_dim].
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    arguments,
    aten,
    call,
    calls,
    is_op,
    ops,
    replace,
    same_shape,
    tensor,
)
from sitsc.passes.slices import half, last_dim, last_slice


@dataclass(frozen=True, slots=True)
class MatchRope:
    """See the module."""

    name: ClassVar[str] = "match_rope"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        tables: dict[Any, fx.Node] = {}
        for node in calls(graph, "add", "cat"):
            if found := _match(node) if is_op(node, "add") else _match_apart(graph, node, tables):
                self._rewrite(graph, found, tables)

    def _rewrite(self, graph: fx.Graph, found: "_Rope", tables: dict[Any, fx.Node]) -> None:
        x, out = _prefix(found) or (found.x, found.out)
        cos, sin = (_flat_table(graph, table, tables) for table in (found.cos, found.sin))
        with graph.inserting_before(out):
            replace(out, call(graph, ops.rope.default, (x, cos, sin, found.style), out))


@dataclass(frozen=True, slots=True)
class _Rope:
    x: Node
    cos: Node
    sin: Node
    style: str
    out: Node


def _rotated(node: Node) -> tuple[Node, str] | None:
    """(source, style) when a node is (-x2, x1) of a source, in either style."""
    if is_op(node, "cat"):
        joined, style = node, "half"
    elif is_op(node, "reshape", "flatten") and is_op(node.args[0], "stack"):
        joined, style = node.args[0], "interleaved"
    else:
        return None
    parts, dim = joined.args[0], arguments(joined)["dim"]
    if (
        len(parts) != 2
        or not is_op(parts[0], "neg")
        or dim % tensor(joined).dim() != last_dim(joined)
    ):
        return None
    high, low = half(parts[0].args[0]), half(parts[1])
    if high is None or low is None or high[0] is not low[0]:
        return None
    source, same = low[0], same_shape(node, low[0])
    fits = (low[1], high[1]) == (0, 1) and low[2] == style == high[2] and same
    return (source, style) if fits else None


def _match(node: Node) -> _Rope | None:
    if arguments(node).get("alpha", 1) != 1:
        return None
    for turned, plain in (node.args[:2], node.args[1::-1]):
        if not (is_op(turned, "mul") and is_op(plain, "mul")):
            continue
        for rotated, sin in (turned.args[:2], turned.args[1::-1]):
            found = _rotated(rotated)
            if found is None or found[0] not in plain.args:
                continue
            cos = next((a for a in plain.args if a is not found[0]), None)
            if _is_table(cos, found[0]) and _is_table(sin, found[0]):
                return _Rope(found[0], cos, sin, found[1], node)
    return None


def _match_apart(graph: fx.Graph, node: Node, tables: dict[Any, fx.Node]) -> _Rope | None:
    """cat(x1·cos − x2·sin, x2·cos + x1·sin) with narrow tables, which are doubled here."""
    parts = node.args[0]
    if len(parts) != 2 or arguments(node)["dim"] % tensor(node).dim() != last_dim(node):
        return None
    low, high = parts
    plain = all(arguments(p).get("alpha", 1) == 1 for p in parts if is_op(p, "sub", "add"))
    products = [*low.args[:2], *high.args[:2]] if is_op(low, "sub") and is_op(high, "add") else []
    if not products or not plain or not all(is_op(p, "mul") for p in products):
        return None
    for x1, cos in (products[0].args[:2], products[0].args[1::-1]):
        for x2, sin in (products[1].args[:2], products[1].args[1::-1]):
            turned = [{x2, cos}, {x1, sin}]
            if [set(p.args) for p in products[2:]] not in (turned, turned[::-1]):
                continue
            one, two = half(x1), half(x2)
            if one is None or two is None or one[0] is not two[0] or (one[1], two[1]) != (0, 1):
                continue
            if one[2] == two[2] and _is_table(cos, x1) and _is_table(sin, x1):
                source = one[0] if one[2] == "half" else _gathered(graph, node, x1, x2)
                wide = _doubled(graph, cos, tables), _doubled(graph, sin, tables)
                return _Rope(source, *wide, "half", node)
    return None


def _gathered(graph: fx.Graph, node: Node, x1: Node, x2: Node) -> Node:
    """The even elements, then the odd ones."""
    with graph.inserting_before(node):
        return call(graph, aten.cat.default, ([x1, x2], -1), node)


def _doubled(graph: fx.Graph, table: Node, known: dict[Any, fx.Node]) -> Node:
    """A table of both halves from that of one, through constant factors and casts to the angles."""
    if is_op(table, "unsqueeze") and tensor(table.args[0]).dim() >= 3:
        return _doubled(graph, table.args[0], known)
    key: Any = ("doubled", table)
    if key in known:
        return known[key]
    if (whole := _whole_table(table)) is not None:
        return whole
    if is_op(table, "cos", "sin"):
        with graph.inserting_after(table.args[0]):
            angles: Any = ("angles", table.args[0])
            if angles not in known:
                pair = [table.args[0], table.args[0]]
                known[angles] = call(graph, aten.cat.default, (pair, -1), table)
        args = (known[angles],)
    elif is_op(table, "_to_copy") or (is_op(table, "mul") and isinstance(table.args[1], float)):
        args = (_doubled(graph, table.args[0], known), *table.args[1:])
    else:
        args = None
    with graph.inserting_after(table):
        if args is None:
            known[key] = call(graph, aten.cat.default, ([table, table], -1), table)
        else:
            known[key] = call(graph, table.target, args, table, **table.kwargs)
    return known[key]


def _whole_table(table: Node) -> Node | None:
    """The table that a first half was cut from, when its halves are the same."""
    part = half(table)
    if part is None or part[1:] != (0, "half"):
        return None
    angles = part[0]
    while is_op(angles, "_to_copy", "mul", "cos", "sin"):
        angles = angles.args[0]
    same = is_op(angles, "cat") and len(angles.args[0]) == 2 and len(set(angles.args[0])) == 1
    return part[0] if same else None


def _is_table(table: Node, x: Node) -> bool:
    """Whether a table is [1, 1, tokens, rotary] over x [1, heads, tokens, rotary], in its dtype."""
    if not isinstance(table, fx.Node) or tensor(table).dtype != tensor(x).dtype:
        return False
    if tensor(x).dim() != 4:
        return False
    wanted = (1, 1, *tensor(x).shape[2:])
    return [str(size) for size in tensor(table).shape] == [str(size) for size in wanted]


def _prefix(found: _Rope) -> tuple[Node, Node] | None:
    """(x, out) of a rotated prefix: out = cat(rope(x[..., :r]), x[..., r:])."""
    head = last_slice(found.x)
    if head is None or len(found.out.users) != 1:
        return None
    joined = next(iter(found.out.users))
    if not is_op(joined, "cat") or len(joined.args[0]) != 2 or joined.args[0][0] is not found.out:
        return None
    rest = last_slice(joined.args[0][1])
    if rest is None or rest.source is not head.source:
        return None
    low, high = (0, head.stop, 1), (head.stop, tensor(head.source).shape[-1], 1)
    fits = (head.start, head.stop, head.step) == low and (rest.start, rest.stop, rest.step) == high
    return (head.source, joined) if fits and same_shape(joined, head.source) else None


def _flat_table(graph: fx.Graph, table: Node, known: dict[Any, fx.Node]) -> Node:
    """The table as [tokens, rotary_dim], made once for all layers."""
    base = table
    while is_op(base, "unsqueeze") and tensor(base.args[0]).dim() >= 3:
        base = base.args[0]
    if base not in known:
        with graph.inserting_after(base):
            width = tensor(base).shape[-1]
            flat = call(graph, aten.reshape.default, (base, [-1, width]), base)
            flat.meta.pop("nn_module_stack", None)
        known[base] = flat
    return known[base]
