"""Experts among ranks: whole ones to groups of ranks (EP), each cut inside its group (TP).

Every rank computes its experts for all tokens; the sum over the ranks is the result. The router is
on every rank.
"""

from typing import Any

from torch import fx

from sitsc.passes.fxutil import Node, arguments, aten, is_op, tensor
from sitsc.passes.shard_layout import Layout, Partial, even
from sitsc.passes.shard_values import Values


def shard_experts(values: Values, node: Node, columns: Any) -> Layout:
    """sitsc::moe and sitsc::experts."""
    args = arguments(node)
    given = {k: values.whole(v) if isinstance(v, fx.Node) else v for k, v in args.items()}
    count, inside = int(tensor(args["down"]).shape[0]), values.tp // values.partition.ep
    given |= _weights(values, args, count, inside)
    if values.partition.ep > 1:
        given |= _of_group(values, node, args, given, count // values.partition.ep, inside)
    if "intermediate" in given:
        given["intermediate"] = int(args["intermediate"]) // inside
    values.put(node, values.emit(node.target, tuple(given.values())))
    return Partial()


def _weights(values: Values, args: dict[str, Any], count: int, inside: int) -> dict[str, Any]:
    """Weights and biases of this rank's experts, cut in its group."""
    ep = values.partition.ep
    ranks = range(values.tp)
    group, place = [r // inside for r in ranks], [r % inside for r in ranks]
    width = int(tensor(args["gate_up"]).shape[1])
    whole = even(count, ep)
    sides = even(2 * count, ep)
    part = even(width, inside)
    found: dict[str, Any] = {}
    for name, held, dim in (
        ("gate_up", sides, 1),
        ("gate_up_bias", sides, 1),
        ("down", whole, 2),
        ("down_bias", whole, 0),
    ):
        weight: Node = args[name]
        if weight is None:
            continue
        if ep > 1:
            weight = values.weight(weight, 0, tuple(held[g] for g in group))
        if inside > 1 and dim:
            weight = values.weight(weight, dim, tuple(part[p] for p in place))
        elif inside > 1:
            weight = values.once(weight, tuple(r for r in ranks if place[r] == 0))
        found[name] = weight
    return found


def _of_group(
    values: Values,
    node: Node,
    args: dict[str, Any],
    given: dict[str, Any],
    mine: int,
    inside: int,
) -> dict[str, Any]:
    """What lets a call see only this group's experts, which are counted from `first` on."""
    emit = values.emit
    group = values.rank()
    if inside > 1:
        group = emit(aten.div.Tensor_mode, (group, inside), rounding_mode="floor")
    first = emit(aten.mul.Tensor, (group, mine))
    if is_op(node, "moe"):
        return {"first": first}
    near = emit(aten.sub.Tensor, (given["indices"], first))
    chosen = emit(aten.clamp.default, (near, 0, mine - 1))
    other = emit(aten.ne.Tensor, (near, chosen))
    weights = emit(aten.masked_fill.Scalar, (given["weights"], other, 0))
    return {"indices": chosen, "weights": weights}
