"""Pack weights: matrices take the blocked format that the CPU kernels stream.

Every reader learns the format; the values are the same. Runs last, for targets whose kernels pack.
"""

from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import ClassVar

from torch import fx

from sitsc.core.weights import WeightSpec
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    arguments,
    is_op,
    set_arguments,
    set_weight,
    spec_of,
    tensor,
    weight_of,
)

_FORMATS = {"float32": "n16", "bfloat16": "n16k2", "int8": "n16k2"}


@dataclass(frozen=True, slots=True)
class PackWeights:
    """See the module."""

    name: ClassVar[str] = "pack_weights"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            spec = weight_of(node)
            if spec is None or not _plain(spec) or not _only_kernels(node):
                continue
            packed = with_fields(spec, format=_FORMATS[spec.dtype])
            set_weight(node, packed, tensor(node))
            for reader in list(node.users):
                set_arguments(reader, weight_format=packed.format)


def _plain(spec: WeightSpec) -> bool:
    return (spec.role, spec.format) == ("weight", "plain") and len(spec.shape) in (2, 3)


def _only_kernels(node: Node) -> bool:
    return bool(node.users) and all(_reads_blocks(reader, node) for reader in node.users)


def _reads_blocks(reader: Node, weight: Node) -> bool:
    if is_op(reader, "moe"):
        return len(spec_of(weight).shape) == 3
    linear = is_op(reader, "fused_linear", "packed_embedding")
    return linear and arguments(reader)["weight"] is weight
