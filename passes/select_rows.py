"""Select rows early: take the rows that need logits before the last norm instead of after it.

rms_norm works on each row alone, so index(norm(x)) equals norm(index(x)); prefill then normalises
one row a sequence, and the norm can be fused with the head.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, arguments, call, calls, is_op, ops, replace, tensor


@dataclass(frozen=True, slots=True)
class SelectRows:
    """See the module."""

    name: ClassVar[str] = "select_rows"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "index"):
            norm, rows = node.args
            if not is_op(norm, "rms_norm") or not _keeps_rows(norm, rows):
                continue
            old = arguments(norm)
            with graph.inserting_before(node):
                picked = call(graph, node.target, (old["x"], rows), node)
                args = (picked, old["weight"], old["eps"], old["offset"])
                replace(node, call(graph, ops.rms_norm.default, args, norm))


def _keeps_rows(norm: Node, rows: Node) -> bool:
    """Whether the index picks whole rows of the norm, and nothing else reads it."""
    return len(rows) < tensor(norm).dim() and len(norm.users) == 1
