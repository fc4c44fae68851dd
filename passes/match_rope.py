"""Match rotary embedding: x·cos + rotate(x)·sin to one sitsc::rope.

Recognises the rotate-half form, the interleaved form (stack of pairs, flattened), and a rotated prefix
concatenated with the rest. cos and sin become [tokens, rotary_dim].
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportReturnType=false  (arguments of fx nodes are of any kind)

import operator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import aten, call, is_op, ops, replace, tensor


@dataclass(frozen=True, slots=True)
class MatchRope:
    """See the module."""

    name: ClassVar[str] = "match_rope"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        tables: dict[fx.Node, fx.Node] = {}
        for node in list(graph.nodes):
            if found := _match(node):
                self._rewrite(graph, found, tables)

    def _rewrite(self, graph: fx.Graph, found: "_Rope", tables: dict[fx.Node, fx.Node]) -> None:
        x, out = found.x, found.out
        prefix = _prefix(found)
        if prefix is not None:
            x, out = prefix
        cos, sin = (_flat_table(graph, table, tables) for table in (found.cos, found.sin))
        with graph.inserting_before(out):
            replace(out, call(graph, ops.rope.default, (x, cos, sin, found.style), out))


@dataclass(frozen=True, slots=True)
class _Rope:
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    style: str
    out: fx.Node


def half(node: object) -> tuple[fx.Node, int, str] | None:
    """(source, 0 or 1, style) when a node is the low or high half, or the even or odd elements."""
    if not isinstance(node, fx.Node):
        return None
    if is_op(node, "slice"):
        return _sliced(node)
    if node.target is operator.getitem and is_op(
        node.args[0], "split", "chunk", "split_with_sizes"
    ):
        source = node.args[0].args[0]
        size, whole = tensor(node).shape[-1], tensor(source).shape[-1]
        return (source, node.args[1], "half") if size * 2 == whole else None
    return None


def _sliced(node: fx.Node) -> tuple[fx.Node, int, str] | None:
    source = node.args[0]
    size = tensor(source).shape[-1]
    dim = node.args[1] if len(node.args) > 1 else 0
    start = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
    stop = node.args[3] if len(node.args) > 3 and node.args[3] is not None else size
    step = node.args[4] if len(node.args) > 4 else 1
    if dim % tensor(source).dim() != tensor(source).dim() - 1 or size % 2:
        return None
    if step == 2 and start in (0, 1) and stop >= size:
        return source, start, "interleaved"
    if start == 0 and stop == size // 2:
        return source, 0, "half"
    if start == size // 2 and stop >= size:
        return source, 1, "half"
    return None


def _rotated(node: object) -> tuple[fx.Node, str] | None:
    """(source, style) when a node is (-x2, x1) of a source, in either style."""
    if is_op(node, "cat"):
        parts, style = node.args[0], "half"
    elif is_op(node, "reshape", "view", "flatten") and is_op(node.args[0], "stack"):
        parts, style = node.args[0].args[0], "interleaved"
    else:
        return None
    if len(parts) != 2 or not is_op(parts[0], "neg"):
        return None
    high, low = half(parts[0].args[0]), half(parts[1])
    if high is None or low is None or high[0] is not low[0]:
        return None
    return (low[0], style) if (low[1], high[1]) == (0, 1) and low[2] == style == high[2] else None


def _match(node: fx.Node) -> _Rope | None:
    if not is_op(node, "add") or len(node.args) < 2:
        return None
    for turned, plain in (node.args[:2], node.args[1::-1]):
        if not (is_op(turned, "mul") and is_op(plain, "mul")):
            continue
        for rotated, sin in (turned.args[:2], turned.args[1::-1]):
            found = _rotated(rotated)
            if found is None or found[0] not in plain.args:
                continue
            cos = next((a for a in plain.args if a is not found[0]), None)
            if isinstance(cos, fx.Node) and isinstance(sin, fx.Node) and _is_table(cos, sin):
                return _Rope(found[0], cos, sin, found[1], node)
    return None


def _is_table(cos: fx.Node, sin: fx.Node) -> bool:
    """Whether both are [1, 1, tokens, rotary]: one row a token, broadcast over heads."""
    shapes = [tensor(table).shape for table in (cos, sin)]
    return all(len(shape) == 4 and shape[0] == shape[1] == 1 for shape in shapes)


def _prefix(found: _Rope) -> tuple[fx.Node, fx.Node] | None:
    """(x, out) of a rotated prefix: out = cat(rope(x[..., :r]), x[..., r:])."""
    if not is_op(found.x, "slice") or len(found.out.users) != 1:
        return None
    joined = next(iter(found.out.users))
    if not is_op(joined, "cat") or len(joined.args[0]) != 2 or joined.args[0][0] is not found.out:
        return None
    rest, whole = joined.args[0][1], found.x.args[0]
    if not is_op(rest, "slice") or rest.args[0] is not whole:
        return None
    same = tensor(joined).shape[-1] == tensor(whole).shape[-1]
    return (whole, joined) if same else None


def _flat_table(graph: fx.Graph, table: fx.Node, known: dict[fx.Node, fx.Node]) -> fx.Node:
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
