"""Match RMS norm: from an anchor (rsqrt of mean square plus epsilon) to one sitsc::rms_norm.

Reads epsilon and the form of the weight (w or 1 + w) off the graph. A norm that does not fit stays as
aten operators and runs slower; nothing is guessed.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
# pyright: reportIndexIssue=false, reportOptionalOperand=false, reportOperatorIssue=false
# pyright: reportCallIssue=false, reportReturnType=false  (arguments of fx nodes are of any kind)

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import call, is_op, ops, replace, tensor


def uncast(node: fx.Node) -> fx.Node:
    """The value under a chain of casts."""
    while is_op(node, "to", "_to_copy", "type_as"):
        node = node.args[0]
    return node


def other(node: fx.Node, one: fx.Node) -> fx.Node | float | None:
    """The second operand of a commutative call that has `one` as an operand."""
    a, b = node.args[:2]
    return b if a is one else a if b is one else None


def _is_parameter(value: object) -> bool:
    return isinstance(value, fx.Node) and uncast(value).op == "placeholder"


@dataclass(frozen=True, slots=True)
class _Norm:
    x: fx.Node
    weight: fx.Node | None
    eps: float
    offset: float
    out: fx.Node


@dataclass(frozen=True, slots=True)
class MatchRmsNorm:
    """See the module."""

    name: ClassVar[str] = "match_rms_norm"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            found = _match(node)
            if found is None or tensor(found.out).dtype != tensor(found.x).dtype:
                continue
            with graph.inserting_before(found.out):
                args = (found.x, found.weight, found.eps, found.offset)
                replace(found.out, call(graph, ops.rms_norm.default, args, found.out))


def _match(node: fx.Node) -> _Norm | None:
    if not (is_op(node, "rsqrt") or (is_op(node, "pow") and node.args[1] == -0.5)):
        return None
    total = node.args[0]
    if not is_op(total, "add"):
        return None
    mean = next((a for a in total.args if is_op(a, "mean")), None)
    eps = next((a for a in total.args[:2] if isinstance(a, (int, float))), None)
    x = _squared(mean.args[0]) if mean is not None and _over_last(mean) else None
    if x is None or eps is None:
        return None
    product = next((u for u in node.users if is_op(u, "mul") and _same(other(u, node), x)), None)
    return None if product is None else _weighted(uncast(x), product, float(eps))


def _over_last(mean: fx.Node) -> bool:
    dims = list(mean.args[1])
    keep = bool(mean.args[2]) if len(mean.args) > 2 else False
    return keep and dims in ([-1], [tensor(mean.args[0]).dim() - 1])


def _squared(square: object) -> fx.Node | None:
    if not isinstance(square, fx.Node):
        return None
    if is_op(square, "pow") and square.args[1] == 2:
        return square.args[0]
    if is_op(square, "square") or (is_op(square, "mul") and square.args[0] is square.args[1]):
        return square.args[0]
    return None


def _same(value: object, x: fx.Node) -> bool:
    return isinstance(value, fx.Node) and uncast(value) is uncast(x)


def _weighted(x: fx.Node, product: fx.Node, eps: float) -> _Norm:
    """Walk over casts to the multiplication by the weight, if there is one."""
    end = _through_casts(product)
    for user in end.users:
        if not is_op(user, "mul"):
            continue
        factor = other(user, end)
        if _is_parameter(factor):
            weight, offset = uncast(factor), 0.0
        elif (inner := _one_plus(factor)) is not None:
            weight, offset = inner, 1.0
        else:
            continue
        if tensor(weight).shape[-1] == tensor(x).shape[-1] and tensor(weight).dim() == 1:
            return _Norm(x, weight, eps, offset, _through_casts(user))
    return _Norm(x, None, eps, 0.0, end)


def _one_plus(factor: object) -> fx.Node | None:
    if not isinstance(factor, fx.Node) or not is_op(uncast(factor), "add"):
        return None
    a, b = uncast(factor).args[:2]
    if a == 1 and _is_parameter(b):
        return uncast(b)
    return uncast(a) if b == 1 and _is_parameter(a) else None


def _through_casts(node: fx.Node) -> fx.Node:
    while len(node.users) == 1:
        user = next(iter(node.users))
        if not is_op(user, "to", "_to_copy", "type_as"):
            break
        node = user
    return node
