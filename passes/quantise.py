"""Quantise: linear weights to int8 with one scale a row (symmetric), opt-in; changes numerics.

Activations stay as they are. A tied embedding table is quantised with the head that shares it; a
router stays exact, because a small error there chooses other experts.
"""

from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    add_weight,
    arguments,
    is_op,
    set_arguments,
    set_weight,
    spec_of,
    tensor,
    weight_of,
)

_READERS = ("fused_linear", "packed_embedding")


@dataclass(frozen=True, slots=True)
class QuantiseInt8:
    """See the module."""

    name: ClassVar[str] = "quantise_int8"
    preserves_numerics: ClassVar[bool] = False

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            spec = weight_of(node)
            if spec is None or spec.dtype == "int8" or not _wanted(node):
                continue
            scale = with_fields(
                spec,
                name=f"{spec.name}.scale",
                role="scale",
                dtype="float32",
                shape=spec.shape[:-1],
            )
            scale_node = add_weight(graph, scale, node)
            set_weight(node, with_fields(spec, dtype="int8"), tensor(node))
            for reader in list(node.users):
                set_arguments(reader, **{_scale_of(reader, node): scale_node})


def _scale_of(reader: Node, weight: Node) -> str:
    """The argument that takes the scale of a weight."""
    if not is_op(reader, "moe"):
        return "scale"
    return "gate_up_scale" if arguments(reader)["gate_up"] is weight else "down_scale"


def _wanted(node: Node) -> bool:
    """Whether a weight is read by our operators alone, and by at least one linear layer."""
    readers = list(node.users)
    if len(readers) == 1 and is_op(readers[0], "moe"):
        return len(spec_of(node).shape) == 3
    only = all(is_op(r, *_READERS) and arguments(r)["weight"] is node for r in readers)
    return only and any(is_op(r, "fused_linear") and not _routes(r) for r in readers)


def _routes(linear: Node) -> bool:
    """Whether a layer gives the scores by which experts are chosen."""
    return any(is_op(user, "moe") and arguments(user)["logits"] is linear for user in linear.users)
