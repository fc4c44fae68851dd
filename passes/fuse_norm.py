"""Fuse norm: an RMS norm whose every reader is a bare linear layer becomes their prologue."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, arguments, calls, is_op, set_arguments


@dataclass(frozen=True, slots=True)
class FuseNorm:
    """See the module; a norm that several layers read is computed again in each of them."""

    name: ClassVar[str] = "fuse_norm"
    preserves_numerics: ClassVar[bool] = True
    most_readers: int = 2
    weightless: bool = True  # whether kernels take a norm without a weight

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "sitsc::rms_norm"):
            readers = list(node.users)
            if arguments(node)["weight"] is None and not self.weightless:
                continue
            if len(readers) <= self.most_readers and all(_takes(r, node) for r in readers):
                norm = arguments(node)
                for reader in readers:
                    set_arguments(
                        reader,
                        x=norm["x"],
                        norm_weight=norm["weight"],
                        prologue="rms_norm",
                        eps=norm["eps"],
                        offset=norm["offset"],
                    )


def _takes(reader: Node, norm: Node) -> bool:
    if not is_op(reader, "fused_linear"):
        return False
    args = arguments(reader)
    return args["x"] is norm and args["prologue"] == "none" and args["residual"] is not norm
