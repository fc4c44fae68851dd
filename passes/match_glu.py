"""Match gated activations: activation(gate)·up to one sitsc::glu."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportReturnType=false  (arguments of fx nodes are of any kind)

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import call, is_op, ops, replace, tensor


def activation_of(node: object) -> str | None:
    """The plan's name of an activation call, or None."""
    if not isinstance(node, fx.Node):
        return None
    if is_op(node, "silu"):
        return "silu"
    if is_op(node, "gelu"):
        tanh = node.kwargs.get("approximate", "none") == "tanh" or "tanh" in node.args[1:]
        return "gelu_tanh" if tanh else "gelu_erf"
    return "relu" if is_op(node, "relu") else None


@dataclass(frozen=True, slots=True)
class MatchGlu:
    """See the module."""

    name: ClassVar[str] = "match_glu"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            if not is_op(node, "mul"):
                continue
            for active, up in (node.args[:2], node.args[1::-1]):
                kind = activation_of(active)
                if kind is None or not isinstance(up, fx.Node):
                    continue
                if len(active.users) == 1 and tensor(up).shape == tensor(active).shape:
                    with graph.inserting_before(node):
                        args = (active.args[0], up, kind)
                        replace(node, call(graph, ops.glu.default, args, node))
                    break
