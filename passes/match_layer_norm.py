"""Match layer norm: aten.layer_norm, or one written by hand, to one sitsc::layer_norm.

By hand: (x - mean) · rsqrt(mean of its square + epsilon), the weight over the last dimension or
over heads, the bias after it. One that does not fit stays as aten operators.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import Node, arguments, call, calls, is_op, ops, tensor
from sitsc.passes.fxutil import replace as replace_node
from sitsc.passes.match_rms_norm import other, over_last, squared, through_casts, widened

_DTYPES = ("torch.float32", "torch.bfloat16")


@dataclass(frozen=True, slots=True)
class _Norm:
    x: Node
    weight: Node
    bias: Node
    eps: float
    out: Node


@dataclass(frozen=True, slots=True)
class MatchLayerNorm:
    """See the module."""

    name: ClassVar[str] = "match_layer_norm"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "layer_norm", "rsqrt"):
            found = _by_hand(node) if is_op(node, "rsqrt") else _from_aten(node)
            if found is None or not _fits(found):
                continue
            with graph.inserting_before(found.out):
                args = (found.x, found.weight, found.bias, found.eps)
                replace_node(found.out, call(graph, ops.layer_norm.default, args, found.out))


def _fits(found: _Norm) -> bool:
    parts = [found.x, found.out, found.weight, found.bias]
    dtypes = {str(tensor(node).dtype) for node in parts if node is not None}
    return len(dtypes) == 1 and dtypes <= set(_DTYPES)


def _from_aten(node: Node) -> _Norm | None:
    """The norm of an aten.layer_norm over the last dimension; ours keep their own schema."""
    if node.target is ops.layer_norm.default:
        return None
    a = arguments(node)
    if len(a["normalized_shape"]) != 1:
        return None
    if any(p is not None and not is_parameter(p) for p in (a["weight"], a["bias"])):
        return None
    return _Norm(a["input"], a["weight"], a["bias"], float(a["eps"]), node)


def _by_hand(node: Node) -> _Norm | None:
    """Walk from rsqrt(mean((x - mean(x))²) + eps) to the product with x - mean(x) and on."""
    total = node.args[0]
    if not is_op(total, "add") or arguments(total).get("alpha", 1) != 1:
        return None
    mean = next((a for a in total.args if is_op(a, "mean")), None)
    eps = next((a for a in total.args[:2] if isinstance(a, (int, float))), None)
    if mean is None or eps is None or not over_last(mean):
        return None
    x = _centred(squared(mean.args[0]))
    if x is None:
        return None
    for product in node.users:
        if is_op(product, "mul") and _centred(other(product, node)) is x:
            return _scaled(_Norm(widened(x), None, None, float(eps), through_casts(product)))
    return None


def _centred(node: Node) -> Node | None:
    """x of x - mean(x) over the last dimension."""
    if not is_op(node, "sub") or arguments(node).get("alpha", 1) != 1:
        return None
    x, mean = node.args[:2]
    return x if is_op(mean, "mean") and over_last(mean) and mean.args[0] is x else None


def _scaled(found: _Norm) -> _Norm:
    """With the weight and the bias that follow, where they do."""
    user = _only_user(found.out)
    weight = other(user, found.out) if is_op(user, "mul") else None
    if is_parameter(weight) and _over_rows(widened(weight), found.x):
        found = replace(found, weight=widened(weight), out=through_casts(user))
        user = _only_user(found.out)
    bias = other(user, found.out) if is_op(user, "add") else None
    if is_parameter(bias) and tensor(widened(bias)).dim() == 1:
        found = replace(found, bias=widened(bias), out=through_casts(user))
    return found


def _over_rows(weight: Node, x: Node) -> bool:
    """Whether a weight is [hidden], or [heads, hidden] over x [..., heads, hidden]."""
    shape, whole = ([str(size) for size in tensor(node).shape] for node in (weight, x))
    return len(shape) in (1, 2) and shape == whole[-len(shape) :]


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_parameter(value: Node) -> bool:
    """Whether a value is a weight, cast or not."""
    return isinstance(value, fx.Node) and "weight" in widened(value).meta
