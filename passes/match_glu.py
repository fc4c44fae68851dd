"""Match gated activations: activation(gate)·up to one sitsc::glu."""

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
    ops,
    replace,
    same_shape,
    tensor,
)


def activation_of(node: Node) -> str | None:
    """The plan's name of an activation call, or None."""
    if is_op(node, "silu"):
        return "silu"
    if is_op(node, "gelu"):
        return "gelu_tanh" if arguments(node)["approximate"] == "tanh" else "gelu_erf"
    return "relu" if is_op(node, "relu") else None


@dataclass(frozen=True, slots=True)
class MatchGlu:
    """See the module; an activation that something else reads too stays as it is."""

    name: ClassVar[str] = "match_glu"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "mul"):
            for active, up in (node.args[:2], node.args[1::-1]):
                kind = activation_of(active)
                if kind is not None and _fits(active, up):
                    with graph.inserting_before(node):
                        args = (active.args[0], up, kind)
                        replace(node, call(graph, ops.glu.default, args, node))
                    break


def _fits(active: Node, up: Node) -> bool:
    if not isinstance(up, fx.Node) or active is up or len(active.users) != 1:
        return False
    return same_shape(active, up) and tensor(active).dtype == tensor(up).dtype
