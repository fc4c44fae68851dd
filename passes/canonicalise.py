"""Canonicalise: erase what computes nothing and give every operation one spelling.

In: the traced graph. Out: the same function without no-op casts, copies, dropout and
multiplications by one; views as reshapes, reciprocal(sqrt) as rsqrt, x·sigmoid(x) as silu.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportReturnType=false  (arguments of fx nodes are of any kind)

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import aten, call, is_op, replace, tensor

_COPIES = ("contiguous", "alias", "clone", "lift_fresh", "detach", "dropout", "native_dropout")


@dataclass(frozen=True, slots=True)
class Canonicalise:
    """See the module."""

    name: ClassVar[str] = "canonicalise"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if _is_noop(node):
                replace(node, node.args[0])
            elif node.target in (aten.view.default, aten._unsafe_view.default):
                node.target = aten.reshape.default
            else:
                _respell(graph, node)


def _is_noop(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    new, old = node.meta.get("val"), node.args[0].meta.get("val")
    if not isinstance(new, torch.Tensor) or not isinstance(old, torch.Tensor):
        return False
    same = new.dtype == old.dtype and new.device == old.device
    if is_op(node, "to", "_to_copy", "type_as", *_COPIES):
        return same and new.shape == old.shape
    if is_op(node, "mul", "div"):
        factor = node.args[1]
        return not isinstance(factor, fx.Node) and factor == 1 and same
    if is_op(node, "slice"):
        return _is_full_slice(node)
    return False


def _is_full_slice(node: fx.Node) -> bool:
    source, dim, start, stop, step = (
        (*node.args, 0, None, None, 1)[:5]
        if len(node.args) == 1
        else (
            *node.args,
            *(None, None, 1)[len(node.args) - 2 :],
        )
    )
    if start not in (0, None) or step != 1:
        return False
    if stop is None or (isinstance(stop, int) and stop >= 2**62):
        return True
    size = tensor(source).shape[dim]
    return isinstance(size, int) and isinstance(stop, int) and stop >= size


def _respell(graph: fx.Graph, node: fx.Node) -> None:
    if is_op(node, "reciprocal") and is_op(node.args[0], "sqrt"):
        with graph.inserting_before(node):
            replace(node, call(graph, aten.rsqrt.default, (node.args[0].args[0],), node))
    elif is_op(node, "mul"):
        for x, gate in (node.args[:2], node.args[1::-1]):
            if is_op(gate, "sigmoid") and gate.args[0] is x:
                with graph.inserting_before(node):
                    replace(node, call(graph, aten.silu.default, (x,), node))
                return
