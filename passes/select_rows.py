"""Select rows early: only rows that need logits go through what follows the last attention.

Operators that work on each row alone commute with taking rows: index(f(x)) equals f(index(x)). The
selection moves up through them, so that in prefill the last layer's output projection and MLP, the
last norm and the head compute one row a sequence.
"""

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, arguments, call, calls, is_op, replace, tensor

# Operators that give a row from the same rows of their arguments.
_ROW_WISE = ("rms_norm", "linear", "glu", "moe", "add", "sub", "mul", "div", "neg", "pow")
_ROW_WISE += ("silu", "gelu", "relu", "tanh", "sigmoid", "_to_copy", "native_layer_norm")
_ROW_WISE += ("layer_norm", "rsqrt")


@dataclass(frozen=True, slots=True)
class SelectRows:
    """See the module."""

    name: ClassVar[str] = "select_rows"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "index"):
            if all(item is None for item in node.args[1][:-1]):
                _Selection(graph, node).move_up()


class _Selection:
    """One selection of rows, and the calls that only it needs."""

    def __init__(self, graph: fx.Graph, index: Node) -> None:
        self.graph, self.index = graph, index
        self.source, self.rows = index.args
        self.prefix = _prefix(self.source, len(self.rows))
        self.inside = self._only_needed_here()
        self.made: dict[Node, Node] = {}

    def move_up(self) -> None:
        """Compute what is inside from selected rows of what is outside."""
        if self.source not in self.inside:
            return
        for node in [n for n in self.graph.nodes if n in self.inside]:
            with self.graph.inserting_before(self.index):
                args = fx.map_arg((node.args, node.kwargs), lambda n, at=node: self._row(n, at))
                self.made[node] = call(self.graph, node.target, args[0], node, **args[1])
        replace(self.index, self.made[self.source])

    def _row(self, value: Node, user: Node) -> Node:
        """The selected rows of an argument of `user`; what has no rows stays."""
        if value in self.made or not self._has_rows(value):
            return self.made.get(value, value)
        flat = tensor(value).dim() == len(self.rows) if len(self.rows) > 1 else False
        rows = self.rows[1:] if flat else self.rows
        self.made[value] = call(self.graph, self.index.target, (value, rows), user)
        return self.made[value]

    def _only_needed_here(self) -> set[Node]:
        """Row-wise calls all of whose results are only read by other such calls or the index."""
        found: set[Node] = set()
        for node in reversed(list(self.graph.nodes)):
            users: Any = node.users
            if not users or not all(user in found or user is self.index for user in users):
                continue
            if _is_row_wise(node) and self._has_rows(node) and self._reads_rows(node):
                found.add(node)
        return found - {
            node for node in found if is_op(node, "reshape") and self._first(node, found)
        }

    @staticmethod
    def _first(node: Node, inside: set[Node]) -> bool:
        """Whether a view is of something outside: taking rows before it saves nothing."""
        source = node.args[0]
        while is_op(source, "reshape") and source in inside:
            source = source.args[0]
        return source not in inside

    def _reads_rows(self, node: Node) -> bool:
        """Whether every argument has the rows, or is the same for all of them."""
        return all(self._has_rows(value) or _is_fixed(value) for value in node.all_input_nodes)

    def _has_rows(self, node: Node) -> bool:
        """Whether the leading dimensions of a value are those that the index selects from.

        A leading dimension of 1 may be missing.
        """
        if node.meta.get("weight") is not None:
            return False
        value = node.meta.get("val")
        parts = value if isinstance(value, list | tuple) else [value]
        return bool(parts) and all(self._rows_first(part) for part in parts)

    def _rows_first(self, part: Any) -> bool:
        sizes, count = [str(size) for size in getattr(part, "shape", ())], len(self.rows)
        if len(sizes) == count and count > 1 and self.prefix[0] == "1":
            return sizes[:-1] == self.prefix[1:]
        return len(sizes) == count + 1 and sizes[:count] == self.prefix


def _is_fixed(node: Node) -> bool:
    """Whether a value has nothing to do with the tokens of a step."""
    if node.meta.get("weight") is not None:
        return True
    shape = getattr(node.meta.get("val"), "shape", None)
    return shape is not None and all(str(size).isdigit() for size in shape)


def _is_row_wise(node: Node) -> bool:
    """Whether a call computes each row from the same row of its arguments."""
    if node.target is operator.getitem or is_op(node, *_ROW_WISE):
        return True
    if is_op(node, "reshape"):
        source, sizes = node.args
        same = str(tensor(source).shape[-1]) == str(tensor(node).shape[-1])
        return same and all(isinstance(size, int) for size in sizes)
    if is_op(node, "split_with_sizes", "split", "slice"):
        values = arguments(node)
        return values["dim"] in (-1, tensor(values["self"]).dim() - 1)
    return False


def _prefix(node: Node, count: int) -> list[str]:
    """The first sizes of a value, as text: comparing symbols could specialise them."""
    return [str(size) for size in tensor(node).shape[:count]]
