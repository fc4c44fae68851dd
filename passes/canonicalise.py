"""Canonicalise: erase what computes nothing and give every operation one spelling.

In: the traced graph. Out: the same function without no-op casts, copies, dropout and
multiplications by one; views as reshapes, reciprocal(sqrt) as rsqrt, x·sigmoid(x) as silu.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    arguments,
    aten,
    call,
    is_op,
    replace,
    same_shape,
    set_arguments,
    tensor,
)

_CASTS = ("to", "_to_copy", "type_as")
_COPIES = ("contiguous", "alias", "clone", "lift_fresh", "detach")
_VIEWS = ("view", "_unsafe_view")
_NO_END = 2**62


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
            else:
                _respell(graph, node)


def _is_noop(node: Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), Tensor):
        return False
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    new, old = tensor(node), tensor(source)
    if (new.dtype, new.device) != (old.dtype, old.device) or not same_shape(node, source):
        return False
    if is_op(node, "mul", "div"):
        return len(node.args) == 2 and not isinstance(node.args[1], fx.Node) and node.args[1] == 1
    if is_op(node, "dropout"):
        return not arguments(node)["train"]
    return is_op(node, *_CASTS, *_COPIES) or (is_op(node, "slice") and _is_full_slice(node))


def _is_full_slice(node: Node) -> bool:
    """Whether a slice takes everything; its shape is known to be that of its source."""
    args = arguments(node)
    end = args["end"]
    return args["start"] in (0, None) and args["step"] == 1 and _past(end, node, args["dim"])


def _past(end: object, node: Node, dim: int) -> bool:
    if end is None:
        return True
    size = tensor(node).shape[dim]
    return isinstance(end, int) and (end >= _NO_END or (isinstance(size, int) and end >= size))


def _close_slice(node: Node) -> None:
    """Write the end of an open slice as a number where the size is one."""
    args = arguments(node)
    size, end = tensor(node.args[0]).shape[args["dim"]], args["end"]
    if isinstance(size, int) and (end is None or (isinstance(end, int) and end >= _NO_END)):
        set_arguments(node, end=size)


def _respell(graph: fx.Graph, node: Node) -> None:
    if is_op(node, *_VIEWS):
        args = (node.args[0], list(node.args[1]))
        with graph.inserting_before(node):
            replace(node, call(graph, aten.reshape.default, args, node))
    elif is_op(node, "slice"):
        _close_slice(node)
    elif is_op(node, "reciprocal") and is_op(node.args[0], "sqrt"):
        with graph.inserting_before(node):
            replace(node, call(graph, aten.rsqrt.default, (node.args[0].args[0],), node))
    elif is_op(node, "mul"):
        for x, gate in (node.args[:2], node.args[1::-1]):
            if is_op(gate, "sigmoid") and gate.args[0] is x:
                with graph.inserting_before(node):
                    replace(node, call(graph, aten.silu.default, (x,), node))
                return
