"""Select rows early: take the rows that need logits before the last norm instead of after it.

rms_norm works on each row alone, so index(norm(x)) equals norm(index(x)); prefill then normalises one
row a sequence, and the norm can be fused with the head.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import arguments, call, is_op, ops, replace


@dataclass(frozen=True, slots=True)
class SelectRows:
    """See the module."""

    name: ClassVar[str] = "select_rows"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            if not is_op(node, "index") or not is_op(node.args[0], "rms_norm"):
                continue
            norm = node.args[0]
            rows = node.args[1]
            over_last = len(rows) == norm.meta["val"].dim()  # pyright: ignore
            if over_last or len(norm.users) != 1:  # pyright: ignore
                continue
            old = arguments(norm)  # pyright: ignore
            with graph.inserting_before(node):
                picked = call(graph, node.target, (old["x"], rows), node)
                args = (picked, old["weight"], old["eps"], old["offset"])
                replace(node, call(graph, ops.rms_norm.default, args, norm))  # pyright: ignore
