"""Match routers: scores, top-k and normalisation before sitsc::experts become one sitsc::moe.

Known: softmax then top-k (with or without normalisation), softmax over the chosen logits, and
sigmoid scores with a correction and limited groups. Another router stays as it is, and the experts
after it are computed densely, which is slow but right.
"""

import math
import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    arguments,
    aten,
    call,
    calls,
    is_op,
    ops,
    same_shape,
    tensor,
    weight_of,
)
from sitsc.passes.fxutil import replace as replace_node


@dataclass(frozen=True, slots=True)
class Router:
    """How experts are chosen and weighted; see sitsc.core.ops.moe.route_reference."""

    logits: Node = None
    correction: Node = None
    top_k: int = 0
    scoring: str = ""
    groups: int = 1
    group_top: int = 1
    normalise: int = 0
    scaling: float = 1.0


@dataclass(frozen=True, slots=True)
class MatchRouter:
    """See the module."""

    name: ClassVar[str] = "match_router"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "experts"):
            router = find_router(node.args[2], node.args[1])
            if router is not None:
                _rewrite(graph, node, router)


def _rewrite(graph: fx.Graph, node: Node, router: Router) -> None:
    old = arguments(node)
    x = old["x"]
    wide = x.args[0] if is_op(x, "reshape") else x
    if tensor(wide).shape[-1] != tensor(x).shape[-1]:
        wide = x
    given: dict[str, Any] = {
        "x": wide,
        "first": None,
        "residual": None,
        "gate_up_scale": None,
        "down_scale": None,
        "intermediate": int(tensor(old["gate_up"]).shape[1]),
        "weight_format": "plain",
    }
    for field in ("logits", "correction", "top_k", "scoring", "groups", "group_top"):
        given[field] = getattr(router, field)
    given |= {"normalise": router.normalise, "scaling": router.scaling}
    names = [a.name for a in ops.moe.default._schema.arguments]
    values = tuple(given[name] if name in given else old[name] for name in names)
    with graph.inserting_before(node):
        new = call(graph, ops.moe.default, values, node)
        for user in list(node.users):
            if is_op(user, "reshape") and same_shape(user, new):
                replace_node(user, new)
        if any(user.users for user in node.users):
            shape = list(node.meta["val"].shape)
            flat = [size if isinstance(size, int) else -1 for size in shape]
            view = new
            if wide is not x:
                view = call(graph, aten.reshape.default, (new, flat), node)
            replace_node(node, view)


def _uncast(node: Node) -> Node:
    while is_op(node, "to", "_to_copy"):
        node = node.args[0]
    return node


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def find_router(weights: Node, indices: Node) -> Router | None:
    """The router that gives `weights` and `indices` [tokens, top_k], or None."""
    value, scaling, normalise = _uncast(weights), 1.0, 0
    if is_op(value, "mul") and (factor := _number(value.args[1])) is not None:
        value, scaling = _uncast(value.args[0]), factor
    if is_op(value, "div") and _is_sum(value.args[1], value.args[0]):
        value, normalise = _uncast(value.args[0]), 1
    found = _chosen_softmax(value, indices) or _top_scores(value, indices)
    found = found or _gathered(value, indices)
    if found is None or (found.scoring == "softmax_chosen" and normalise):
        return None
    return replace(found, scaling=scaling, normalise=normalise)


def _is_sum(node: Node, of: Node) -> bool:
    """Whether `node` is the sum over the last dimension of `of`, perhaps with a tiny addend."""
    node = _uncast(node)
    if is_op(node, "add"):
        tiny = _number(node.args[1])
        if tiny is None or not 0 <= tiny <= 1e-9:
            return False
        node = node.args[0]
    if not is_op(node, "sum") or node.args[0] is not of:
        return False
    args = arguments(node)
    return list(args["dim"]) in ([-1], [tensor(of).dim() - 1]) and args["keepdim"]


def _part(node: Node, index: int) -> Node | None:
    """The topk call of which `node` is an output."""
    if getattr(node, "target", None) is not operator.getitem or node.args[1] != index:
        return None
    top = node.args[0]
    if not is_op(top, "topk"):
        return None
    args = arguments(top)
    last = args["dim"] in (-1, tensor(args["self"]).dim() - 1)
    return top if last and args["largest"] else None


def _last_softmax(node: Node) -> bool:
    return is_op(node, "softmax", "_softmax") and node.args[1] in (-1, tensor(node).dim() - 1)


def _scores(node: Node) -> Router | None:
    """Scores [tokens, experts] as a router that has chosen nothing yet."""
    node = _uncast(node)
    if _last_softmax(node):
        return Router(_uncast(node.args[0]), scoring="softmax")
    if is_op(node, "sigmoid"):
        return Router(_uncast(node.args[0]), scoring="sigmoid")
    return None


def _top_scores(value: Node, indices: Node) -> Router | None:
    """The best of the scores, with their values as weights."""
    top = _part(value, 0)
    if top is None or _part(indices, 1) is not top:
        return None
    scores = _scores(top.args[0])
    return replace(scores, top_k=top.args[1]) if scores else None


def _chosen_softmax(value: Node, indices: Node) -> Router | None:
    """The softmax over the best logits."""
    if not _last_softmax(value):
        return None
    top = _part(_uncast(value.args[0]), 0)
    if top is None or _part(indices, 1) is not top:
        return None
    return Router(_uncast(top.args[0]), top_k=top.args[1], scoring="softmax_chosen")


def _gathered(value: Node, indices: Node) -> Router | None:
    """Chosen by corrected scores, perhaps in limited groups; weights are the scores themselves."""
    top = _part(indices, 1)
    if top is None or not is_op(value, "gather") or value.args[2] is not indices:
        return None
    scores = _scores(value.args[0])
    if scores is None or value.args[1] not in (-1, 1):
        return None
    choice, scores = top.args[0], replace(scores, top_k=top.args[1])
    if is_op(choice, "masked_fill"):
        groups = _groups(choice)
        if groups is None:
            return None
        scores = replace(scores, groups=groups[0], group_top=groups[1])
        choice = choice.args[0]
    if is_op(choice, "add") and _uncast(choice.args[0]) is _uncast(value.args[0]):
        if weight_of(_uncast(choice.args[1])) is None or tensor(choice.args[1]).dim() != 1:
            return None
        return replace(scores, correction=_uncast(choice.args[1]))
    return scores if _uncast(choice) is _uncast(value.args[0]) else None


def _groups(filled: Node) -> tuple[int, int] | None:
    """Number of groups and how many of them are kept, of a masked choice."""
    choice, mask, fill = filled.args
    if fill != -math.inf or not is_op(mask, "bitwise_not", "logical_not"):
        return None
    node = _uncast(mask.args[0])
    while is_op(node, "reshape", "expand", "unsqueeze", "clone"):
        node = node.args[0]
    if not is_op(node, "scatter") or node.args[1] not in (-1, 1) or node.args[3] != 1:
        return None
    kept = _part(node.args[2], 1)
    if kept is None or not is_op(node.args[0], "zeros_like") or not is_op(kept.args[0], "sum"):
        return None
    best = _part(kept.args[0].args[0], 0)
    if best is None or best.args[1] != 2 or not is_op(best.args[0], "reshape"):
        return None
    apart = best.args[0]
    if apart.args[0] is not choice or tensor(apart).dim() != 3:
        return None
    return int(tensor(apart).shape[1]), int(kept.args[1])
