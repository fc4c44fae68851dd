"""Fuse residual: residual + linear(x) becomes the linear layer's epilogue."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.core.weights import dtype_name
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import arguments, call, is_op, ops, replace, tensor


@dataclass(frozen=True, slots=True)
class FuseResidual:
    """See the module."""

    name: ClassVar[str] = "fuse_residual"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            if is_op(node, "add") and len(node.args) == 2 and node.kwargs.get("alpha", 1) == 1:
                for linear, residual in (node.args, node.args[::-1]):
                    if self._fits(node, linear, residual):
                        self._fuse(graph, node, linear, residual)  # pyright: ignore
                        break

    def _fits(self, node: fx.Node, linear: object, residual: object) -> bool:
        if not isinstance(linear, fx.Node) or not isinstance(residual, fx.Node):
            return False
        if not is_op(linear, "fused_linear") or len(linear.users) != 1 or linear is residual:
            return False
        args = arguments(linear)
        same = dtype_name(tensor(node).dtype) == args["out_dtype"]
        shapes = tensor(residual).shape == tensor(linear).shape
        return args["epilogue"] == "none" and same and shapes

    def _fuse(self, graph: fx.Graph, node: fx.Node, linear: fx.Node, residual: fx.Node) -> None:
        args = arguments(linear) | {"residual": residual, "epilogue": "residual"}
        with graph.inserting_before(node):
            values = tuple(args.values())
            replace(node, call(graph, ops.fused_linear.default, values, linear))
