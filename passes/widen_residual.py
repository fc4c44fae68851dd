"""Widen the residual stream: it stays in float32 from the embedding to the last norm.

Sums of layers are then rounded once, in the norm that reads them, and not after every layer. Values
that anything but a norm before a linear layer, a residual sum or the selection of rows reads stay
as they are. Only for targets whose kernels take such a stream, and only on demand.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.core.weights import DTYPES
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, arguments, calls, fake, is_op, set_arguments, tensor

_WIDE = "float32"


@dataclass(frozen=True, slots=True)
class WidenResidual:
    """See the module."""

    name: ClassVar[str] = "widen_residual"
    preserves_numerics: ClassVar[bool] = False

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        stream = _stream(graph)
        for node in graph.nodes:
            if node not in stream:
                continue
            if is_op(node, "fused_linear"):
                set_arguments(node, out_dtype=_WIDE)
            elif is_op(node, "packed_embedding"):
                set_arguments(node, dtype=_WIDE)
            fake(node)


def _stream(graph: fx.Graph) -> set[Node]:
    """The values that can be wide: the largest set of sums that only such sums and norms read."""
    found = set(calls(graph, "packed_embedding", "index"))
    found |= {n for n in calls(graph, "fused_linear") if arguments(n)["epilogue"] == "residual"}
    found = {node for node in found if tensor(node).dtype == DTYPES["bfloat16"]}
    while wrong := {node for node in found if not _stays(node, found)}:
        found -= wrong
    return found


def _stays(node: Node, stream: set[Node]) -> bool:
    """Whether what a value is made from and all that read it can be wide with it."""
    if is_op(node, "index") and node.args[0] not in stream:
        return False
    if is_op(node, "fused_linear") and arguments(node)["residual"] not in stream:
        return False
    return all(_reads_wide(user, node, stream) for user in node.users)


def _reads_wide(user: Node, node: Node, stream: set[Node]) -> bool:
    if is_op(user, "index"):
        return user in stream
    if not is_op(user, "fused_linear"):
        return False
    a = arguments(user)
    normed = a["x"] is node and a["prologue"] == "rms_norm"
    added = a["residual"] is node and user in stream
    places = [name for name, value in a.items() if value is node]
    return all((name == "x" and normed) or (name == "residual" and added) for name in places)
