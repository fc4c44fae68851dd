"""Match rotary embedding: x·cos + rotate(x)·sin to one sitsc::rope.

Recognises the rotate-half form, the interleaved form (stack of pairs, flattened), and a rotated
prefix concatenated with the rest. cos and sin become [tokens, rotary_dim].
"""

from dataclasses import dataclass
from typing import ClassVar

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
        tables: dict[fx.Node, fx.Node] = {}
        for node in calls(graph, "add"):
            if found := _match(node):
                self._rewrite(graph, found, tables)

    def _rewrite(self, graph: fx.Graph, found: "_Rope", tables: dict[fx.Node, fx.Node]) -> None:
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


def _flat_table(graph: fx.Graph, table: Node, known: dict[fx.Node, fx.Node]) -> Node:
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
