"""Fuse residual: residual + linear(x) becomes the linear layer's epilogue.

Experts and sums over ranks take one too.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    arguments,
    call,
    calls,
    is_op,
    replace,
    same_shape,
    tensor,
)

_TAKING = ("fused_linear", "moe", "all_reduce")


@dataclass(frozen=True, slots=True)
class FuseResidual:
    """See the module."""

    name: ClassVar[str] = "fuse_residual"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "add"):
            for linear, residual in (node.args[:2], node.args[1::-1]):
                if arguments(node).get("alpha", 1) == 1 and self._fits(linear, residual):
                    self._fuse(graph, node, linear, residual)
                    break

    def _fits(self, linear: Node, residual: Node) -> bool:
        if not isinstance(residual, fx.Node) or not is_op(linear, *_TAKING):
            return False
        if len(linear.users) != 1 or linear is residual:
            return False
        same = tensor(linear).dtype == tensor(residual).dtype and same_shape(linear, residual)
        args = arguments(linear)
        bare = args["residual"] is None and args.get("epilogue", "none") == "none"
        return bare and same

    def _fuse(self, graph: fx.Graph, node: Node, linear: Node, residual: Node) -> None:
        args = arguments(linear) | {"residual": residual}
        if "epilogue" in args:
            args["epilogue"] = "residual"
        with graph.inserting_before(node):
            replace(node, call(graph, linear.target, tuple(args.values()), linear))
