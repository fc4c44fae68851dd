"""Match concatenation: parts written one after another into an empty tensor become one cat.

In: slice_scatter(slice_scatter(empty, a, dim, 0, n), b, dim, n, end). Out: cat([a, b], dim).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, arguments, aten, call, calls, is_op, replace, tensor


@dataclass(frozen=True, slots=True)
class MatchConcat:
    """See the module."""

    name: ClassVar[str] = "match_concat"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "slice_scatter")[::-1]:
            parts = _parts(node)
            if parts:
                with graph.inserting_before(node):
                    args = (parts, arguments(node)["dim"])
                    replace(node, call(graph, aten.cat.default, args, node))


def _parts(node: Node) -> list[Node]:
    """What fills a tensor from its end to its start, in order of place; empty unless all of it."""
    parts: list[Node] = []
    dim, size = arguments(node)["dim"], tensor(node).shape[arguments(node)["dim"]]
    while is_op(node, "slice_scatter") and isinstance(size, int):
        a = arguments(node)
        start, stop, step = slice(a["start"], a["end"], a["step"]).indices(size)
        end = size - sum(tensor(part).shape[dim] for part in parts)
        if (a["dim"], stop, step) != (dim, end, 1):
            return []
        parts.insert(0, a["src"].args[1] if is_op(a["src"], "copy") else a["src"])
        fits = tensor(parts[0]).shape[dim] == stop - start
        if not fits or tensor(parts[0]).dtype != tensor(node).dtype:
            return []
        node = a["self"]
        if start == 0:
            return parts if is_op(node, "empty", "new_empty", "empty_like") else []
    return []
