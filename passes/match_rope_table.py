"""Match the rope table: position · inv_freq, its cosine and sine, to one sitsc::rope_table.

Runs after rotary embedding was matched, on the flat [tokens, rotary_dim] tables that it left. For
targets without a code generator for small operators; a table that does not fit stays as it is.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from sitsc.core.weights import dtype_name
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import aten, call, is_op, ops, replace, tensor, weight_of

Node = Any


@dataclass(frozen=True, slots=True)
class _Table:
    kind: str
    positions: Node
    inv_freq: Node
    scaling: float


@dataclass(frozen=True, slots=True)
class MatchRopeTable:
    """See the module."""

    name: ClassVar[str] = "match_rope_table"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        made: dict[tuple[Any, ...], Node] = {}
        for node in list(graph.nodes):
            if not is_op(node, "reshape") or (found := _match(node)) is None:
                continue
            dtype = dtype_name(tensor(node).dtype)
            key = (found.positions, found.inv_freq, found.scaling, dtype)
            with graph.inserting_before(node):
                if key not in made:
                    made[key] = call(graph, ops.rope_table.default, key, node)
                part = 0 if found.kind == "cos" else 1
                replace(node, call(graph, aten.select.int, (made[key], 0, part), node))


def _match(node: Node) -> _Table | None:
    """Walk up: reshape, cast, scale, cos or sin, cat of the same angles twice, product."""
    value, scaling = _uncast(node.args[0]), 1.0
    if is_op(value, "mul") and isinstance(value.args[1], float):
        value, scaling = _uncast(value.args[0]), value.args[1]
    if not is_op(value, "cos", "sin"):
        return None
    kind = "cos" if is_op(value, "cos") else "sin"
    joined = value.args[0]
    if not is_op(joined, "cat") or len(joined.args[0]) != 2 or len(set(joined.args[0])) != 1:
        return None
    product = joined.args[0][0]
    if not is_op(product, "mul"):
        return None
    for positions, inv_freq in (product.args[:2], product.args[1::-1]):
        spec = weight_of(inv_freq)
        source = _positions(positions)
        if spec is not None and len(spec.shape) == 1 and source is not None:
            return _Table(kind, source, inv_freq, scaling)
    return None


def _uncast(node: Node) -> Node:
    while is_op(node, "_to_copy", "to"):
        node = node.args[0]
    return node


def _positions(node: Node) -> Node | None:
    """The flat step input behind [1, tokens, 1] of float positions."""
    while is_op(node, "_to_copy", "to", "unsqueeze"):
        node = node.args[0]
    is_input = isinstance(node, fx.Node) and node.meta.get("input") == "position_ids"
    return node if is_input else None
