"""Positions of a decoder written by hand: what counts or cuts by the number of tokens becomes a
look-up by position_ids.

`arange(tokens)` becomes the positions themselves, `table[:tokens]` the rows of the table at them.
Also finds how many positions the tables hold.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

aten: Any = torch.ops.aten
Node = Any
Evaluate = Callable[[Node, int], Tensor | None]
_LOOK_UPS = {"aten.embedding": (0, 1, 0), "aten.index_select": (0, 2, None)}


@dataclass(frozen=True, slots=True)
class Placed:
    """Nodes to be replaced, and the most tokens that tables and the forward allow (0: no bound)."""

    graph: fx.Graph
    counts: tuple[Node, ...]
    cuts: tuple[Node, ...]
    most_tokens: int

    def rewrite(self) -> None:
        """Replace what is still read."""
        [positions] = self.graph.find_nodes(op="placeholder", target="position_ids")
        for node in self.counts:
            if node.users:
                with self.graph.inserting_before(node):
                    node.replace_all_uses_with(_cast(self.graph, positions, node))
        for node in self.cuts:
            if node.users:
                dim = node.args[1] if len(node.args) > 1 else 0
                with self.graph.inserting_before(node):
                    args = (node.args[0], dim, positions)
                    new = _call(self.graph, aten.index_select.default, args, node)
                node.replace_all_uses_with(new)
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def place_positions(graph: fx.Graph, token_ids: Node, evaluate: Evaluate, bound: int) -> Placed:
    """Find counts and cuts; `evaluate(node, tokens)` gives values that depend on no token."""
    [symbol] = token_ids.meta["val"].shape
    counts, cuts = [], []
    limits = [bound] if bound else []
    for node in graph.nodes:
        if _is_count(node, symbol):
            counts.append(node)
        elif (rows := _cut_rows(node, symbol)) is not None:
            cuts.append(node)
            limits.append(rows)
        elif (rows := _looked_up_rows(node, evaluate, symbol)) is not None:
            limits.append(rows)
    return Placed(graph, tuple(counts), tuple(cuts), min(limits, default=0))


def _is_count(node: Node, symbol: Any) -> bool:
    """Whether a node is arange(tokens): 0, 1, … tokens - 1."""
    if not str(node.target).startswith("aten.arange"):
        return False
    schema = node.target._schema.arguments
    values = {"start": 0, "step": 1} | {
        a.name: value for a, value in zip(schema, node.args, strict=False)
    }
    return values["start"] == 0 and values["step"] == 1 and _is_symbol(values["end"], symbol)


def _is_symbol(value: Any, symbol: Any) -> bool:
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return isinstance(value, torch.SymInt) and str(value) == str(symbol)


def _cut_rows(node: Node, symbol: Any) -> int | None:
    """Rows of a table of which a node takes the first `tokens`, or None."""
    if not str(node.target).startswith("aten.slice"):
        return None
    _, dim, start, end, step = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
    rows = node.args[0].meta["val"].shape[dim]
    first = start in (0, None) and step == 1 and _is_symbol(end, symbol)
    return rows if first and isinstance(rows, int) else None


def _looked_up_rows(node: Node, evaluate: Evaluate, symbol: Any) -> int | None:
    """How many positions a table holds that is indexed by something made of positions."""
    for name, (table, index, dim) in _LOOK_UPS.items():
        if not str(node.target).startswith(name):
            continue
        if not any(str(symbol) == str(s) for s in node.args[index].meta["val"].shape):
            return None
        value = evaluate(node.args[index], 2)
        if value is None or value.numel() != 2:
            return None
        first, second = value.flatten().tolist()
        rows = node.args[table].meta["val"].shape[node.args[1] if dim is None else dim]
        return int(rows) - first if second == first + 1 else None
    return None


def _cast(graph: fx.Graph, positions: Node, like: Node) -> Node:
    dtype = like.meta["val"].dtype
    if dtype == torch.int64:
        return positions
    return _call(graph, aten._to_copy.default, (positions,), like, dtype=dtype)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: Node, **kwargs: Any) -> Node:
    node = graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    with like.meta["val"].fake_mode, torch.no_grad():
        node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node
