"""Simplify views: a chain of reshapes and selections of the only row becomes one reshape, or none.

Sizes are written as numbers, the one symbolic size as -1, so that no size has to be computed at run
time. A view with more than one symbolic size stays as it is.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, aten, call, calls, is_op, replace, same_shape, tensor


@dataclass(frozen=True, slots=True)
class SimplifyViews:
    """See the module."""

    name: ClassVar[str] = "simplify_views"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "reshape", "select"):
            if not _is_view(node):
                continue
            source, sizes = _source(node), _sizes(node)
            if same_shape(source, node):
                replace(node, source)
            elif sizes is not None and (source, sizes) != (node.args[0], node.args[1]):
                with graph.inserting_before(node):
                    replace(node, call(graph, aten.reshape.default, (source, sizes), node))


def _is_view(node: Node) -> bool:
    """Whether a call keeps all elements in their order."""
    if is_op(node, "select"):
        size = tensor(node.args[0]).shape[node.args[1]]
        return isinstance(size, int) and size == 1
    return is_op(node, "reshape", "unsqueeze")


def _source(node: Node) -> Node:
    while _is_view(node):
        node = node.args[0]
    return node


def _sizes(node: Node) -> list[int] | None:
    """The shape of a node with -1 for its symbolic size; None when there are several."""
    sizes = [size if isinstance(size, int) else -1 for size in tensor(node).shape]
    return sizes if sizes.count(-1) < 2 else None
