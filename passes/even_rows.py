"""Even rows: what our kernels read lies in memory as rows at one distance; else a copy is made.

Graphs of other people's modules may hand a transposed tensor to a linear layer, or permuted heads
to attention. Runs last; strides are computed afresh, since passes before it erase copies.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    arguments,
    aten,
    call,
    fake,
    set_arguments,
    tensor,
)

_WHOLE = {"packed_embedding": ("ids",)}
_EVEN = {"fused_linear": ("x", "residual"), "moe": ("x", "logits")}
_DENSE = {"rms_norm": ("x",), "layer_norm": ("x",), "paged_attention": ("q", "k", "v")}


@dataclass(frozen=True, slots=True)
class EvenRows:
    """See the module."""

    name: ClassVar[str] = "even_rows"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            if node.op == "call_function" and _reads_tensors(node):
                _settle(graph, node)
                fake(node)


def _reads_tensors(node: Node) -> bool:
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    return any(isinstance(value, Tensor) for value in values)


def _settle(graph: fx.Graph, node: Node) -> None:
    """Copy the arguments of a call of ours that do not lie as its kernel reads them."""
    for table, fits in ((_WHOLE, _whole), (_EVEN, _even), (_DENSE, _dense)):
        name = str(node.target).partition(".")[2].partition(".")[0]
        if not str(node.target).startswith("sitsc.") or name not in table:
            continue
        for key in table[name]:
            value: Any = arguments(node)[key]
            if value is not None and not fits(tensor(value)):
                with graph.inserting_before(node):
                    copy = call(graph, aten.clone.default, (value,), value, memory_format=_PACKED)
                set_arguments(node, **{key: copy})


_PACKED = torch.contiguous_format


def _dense(value: Tensor) -> bool:
    """Whether the elements of a row lie side by side."""
    return value.dim() > 0 and value.stride(-1) == 1


def _whole(value: Tensor) -> bool:
    """Whether the elements lie without gaps in their order."""
    dims = [i for i in range(value.dim()) if str(value.shape[i]) != "1"]
    return not dims or (str(value.stride(dims[-1])) == "1" and _follows(value, dims))


def _even(value: Tensor) -> bool:
    """Whether all rows lie one distance apart; strides compared as text, as sizes are."""
    outer = [i for i in range(value.dim() - 1) if str(value.shape[i]) != "1"]
    return _dense(value) and _follows(value, outer)


def _follows(value: Tensor, dims: list[int]) -> bool:
    """Whether each of the dimensions goes over the whole of the one after it."""
    sizes, strides = value.shape, value.stride()
    return all(str(strides[a]) == str(strides[b] * sizes[b]) for a, b in pairwise(dims))
