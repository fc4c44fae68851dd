"""Lower embedding: a table lookup that reads the weight format of the kernels.

A tied table is stored once, in the format of the head, and read by both.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sitsc.core.weights import dtype_name
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import arguments, call, calls, ops, replace, tensor, weight_of
from sitsc.passes.lower_linear import KERNEL_DTYPES


@dataclass(frozen=True, slots=True)
class LowerEmbedding:
    """See the module."""

    name: ClassVar[str] = "lower_embedding"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "embedding"):
            spec, ids = weight_of(node.args[0]), tensor(node.args[1])
            if spec is not None and spec.dtype in KERNEL_DTYPES and ids.dtype == torch.int64:
                old = arguments(node)
                rows, hidden = spec.shape
                dtype = dtype_name(tensor(node).dtype)
                args = (old["indices"], old["weight"], None, rows, hidden, dtype, "plain")
                with graph.inserting_before(node):
                    replace(node, call(graph, ops.packed_embedding.default, args, node))
