"""Fuse activation: an activation that alone reads a bare linear layer becomes its epilogue."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fuse_glu import plain_linear
from sitsc.passes.fxutil import Node, call, calls, is_op, replace, tensor
from sitsc.passes.lower_linear import linear_arguments
from sitsc.passes.match_glu import activation_of


@dataclass(frozen=True, slots=True)
class FuseActivation:
    """See the module; relu², as a square of the only reader of relu, is one too."""

    name: ClassVar[str] = "fuse_activation"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "silu", "gelu", "relu"):
            linear, kind, out = node.args[0], activation_of(node), node
            args = plain_linear(linear)
            if args is None or kind is None or len(linear.users) != 1:
                continue
            if kind == "relu" and (square := _square(node)) is not None:
                kind, out = "relu2", square
            if tensor(out).dtype != tensor(linear).dtype:
                continue
            given = args | {"epilogue": "activation", "activation": kind}
            with graph.inserting_before(out):
                replace(out, call(graph, linear.target, linear_arguments(**given), linear))


def _square(node: Node) -> Node:
    """x² where it alone reads x."""
    user: Node = next(iter(node.users)) if len(node.users) == 1 else None
    if is_op(user, "pow") and user.args == (node, 2):
        return user
    twice = is_op(user, "mul") and user.args[0] is node and user.args[1] is node
    return user if twice or is_op(user, "square") else None
