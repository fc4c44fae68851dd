"""Match RMS norm: aten.rms_norm, or one written by hand, to one sitsc::rms_norm.

By hand: from an anchor (rsqrt of mean square plus epsilon) on. Epsilon and the form of the weight
(w or 1 + w) are read off the graph. A norm that does not fit stays as aten operators and runs
slower; nothing is guessed.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, arguments, call, calls, is_op, ops, replace, tensor

_DTYPES = {torch.float32, torch.bfloat16}
_CASTS = ("to", "_to_copy", "type_as")


def widened(node: Node) -> Node:
    """The value under casts that lose nothing."""
    while is_op(node, *_CASTS):
        source = node.args[0]
        if torch.promote_types(tensor(source).dtype, tensor(node).dtype) != tensor(node).dtype:
            break
        node = source
    return node


def other(node: Node, one: Node) -> Node:
    """The second operand of a commutative call that has `one` as an operand, or None."""
    a, b = node.args[:2]
    return b if a is one else a if b is one else None


def _is_parameter(value: Node) -> bool:
    return isinstance(value, fx.Node) and widened(value).op == "placeholder"


@dataclass(frozen=True, slots=True)
class _Norm:
    x: Node
    weight: Node
    eps: float
    offset: float
    out: Node


@dataclass(frozen=True, slots=True)
class MatchRmsNorm:
    """See the module."""

    name: ClassVar[str] = "match_rms_norm"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "rsqrt", "pow", "aten::rms_norm"):
            found = _from_aten(node) if is_op(node, "rms_norm") else _match(node)
            if found is None or not _one_dtype(found):
                continue
            with graph.inserting_before(found.out):
                args = (found.x, found.weight, found.eps, found.offset)
                replace(found.out, call(graph, ops.rms_norm.default, args, found.out))


def _one_dtype(found: _Norm) -> bool:
    dtypes = {tensor(node).dtype for node in (found.x, found.weight, found.out) if node is not None}
    return len(dtypes) == 1 and dtypes <= _DTYPES


def _from_aten(node: Node) -> _Norm | None:
    """The norm of an aten.rms_norm over the last dimension; no epsilon is that of the dtype."""
    a = arguments(node)
    weight = a["weight"]
    if len(a["normalized_shape"]) != 1 or not (weight is None or _is_parameter(weight)):
        return None
    eps = torch.finfo(tensor(node).dtype).eps if a["eps"] is None else float(a["eps"])
    return _Norm(a["input"], weight, eps, 0.0, node)


def _match(node: Node) -> _Norm | None:
    total = node.args[0]
    if (is_op(node, "pow") and node.args[1] != -0.5) or not is_op(total, "add"):
        return None
    if arguments(total).get("alpha", 1) != 1:
        return None
    mean = next((a for a in total.args if is_op(a, "mean")), None)
    eps = next((a for a in total.args[:2] if isinstance(a, (int, float))), None)
    x = squared(mean.args[0]) if mean is not None and over_last(mean) else None
    if x is None or eps is None:
        return None
    product = next((u for u in node.users if is_op(u, "mul") and _same(other(u, node), x)), None)
    return None if product is None else _weighted(widened(x), product, float(eps))


def over_last(mean: Node) -> bool:
    """Whether a mean is taken over the last dimension, which is kept."""
    args = arguments(mean)
    last = tensor(mean.args[0]).dim() - 1
    return bool(args.get("keepdim")) and list(args.get("dim") or []) in ([-1], [last])


def squared(square: Node) -> Node:
    """x of x², or None."""
    if is_op(square, "pow"):
        return square.args[0] if square.args[1] == 2 else None
    twice = is_op(square, "mul") and square.args[0] is square.args[1]
    return square.args[0] if twice or is_op(square, "square") else None


def _same(value: Node, x: Node) -> bool:
    return isinstance(value, fx.Node) and widened(value) is widened(x)


def _weighted(x: Node, product: Node, eps: float) -> _Norm:
    """Walk over casts to the multiplication by the weight, if there is one."""
    end = through_casts(product)
    user = next(iter(end.users)) if len(end.users) == 1 else None
    factor = other(user, end) if is_op(user, "mul") else None
    weight, offset = (widened(factor), 0.0) if _is_parameter(factor) else _one_plus(factor)
    if weight is not None and [*map(str, tensor(weight).shape)] == [str(tensor(x).shape[-1])]:
        return _Norm(x, weight, eps, offset, through_casts(user))
    return _Norm(x, None, eps, 0.0, end)


def _one_plus(factor: Node) -> tuple[Node, float]:
    """(w, 1) of 1 + w, else (None, 0)."""
    total = widened(factor)
    if is_op(total, "add") and arguments(total).get("alpha", 1) == 1:
        for one, weight in (total.args[:2], total.args[1::-1]):
            if one == 1 and _is_parameter(weight):
                return widened(weight), 1.0
    return None, 0.0


def through_casts(node: Node) -> Node:
    """The last of the casts that alone read a value."""
    while len(node.users) == 1:
        user = next(iter(node.users))
        if not is_op(user, *_CASTS):
            break
        node = user
    return node
