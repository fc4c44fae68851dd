"""What a rank of a GPU plan needs at most when the model is cut among more ranks.

In: a plan of one rank. Out: bounds from above, from sizes in the plan alone: matrices divide by TP,
layers by PP, and little besides. Traces nothing, so that a runtime can tell as well as a compiler.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sitsc.core.errors import PartitionError
from sitsc.core.hardware import load_target
from sitsc.core.memory_budget import needed_bytes
from sitsc.core.parallel import Divisible, Partition, check_partition
from sitsc.core.plan import Plan
from sitsc.core.weight_spec import WeightSpec

_MOST_RANKS = 8  # where the target names no number of devices in a host
_HELD_WHOLE = 512  # rows or columns of a matrix that may be no rank's own, as a router's
_UNEVEN = 100  # one in so many bytes of matrices is counted on every rank: padding, repeated heads
_STREAM_BYTES = 4
_QUERIES, _KEYS = ("num_attention_heads", "n_head"), ("num_key_value_heads",)
_HIDDEN, _LAYERS = ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer")
_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclass(frozen=True, slots=True)
class MoreRanks:
    """A degree to compile with ("--tp 4"), and bytes of a rank: all but KV, and of a KV page."""

    option: str
    fixed_bytes: int
    page_bytes: int


def more_ranks(plan: Plan) -> Iterator[list[MoreRanks]]:
    """Larger degrees of TP, then of PP, that divide the model and fit a host; smallest first.

    Nothing where the plan does not say what must divide.
    """
    sizes, now = plan.model.dimensions, plan.parallel
    queries, hidden = _first(sizes, _QUERIES), _first(sizes, _HIDDEN)
    if not queries or not hidden or not plan.target.isa.startswith("sm_"):
        return
    held = {layer for one in plan.model.layer_classes for layer in one.layers}
    layers = max(_first(sizes, _LAYERS) or len(held) * now.pp, len(held))
    model = Divisible(
        heads=((queries, _first(sizes, _KEYS) or queries),),
        intermediate=tuple(sizes[name] for name in _INNER if sizes.get(name)),
        experts=(),
        num_layers=layers,
    )
    most = load_target(plan.target.name).host.devices or _MOST_RANKS
    tps = [Partition(now.tp * n, now.pp) for n in range(2, most // (now.tp * now.pp) + 1)]
    pps = [Partition(now.tp, n) for n in range(now.pp + 1, most // now.tp + 1)]
    yield [_of_tp(plan, p, hidden) for p in tps if _divides(p, model)]
    yield [_of_pp(plan, p, hidden, layers) for p in pps if _divides(p, model)]


def _of_tp(plan: Plan, partition: Partition, hidden: int) -> MoreRanks:
    times = partition.tp // plan.parallel.tp
    weights = sum(_share(spec, times) for spec in plan.model.parameters)
    page = sum(g.page_bytes // g.kv_heads * -(-g.kv_heads // times) for g in plan.kv)
    return MoreRanks(f"--tp {partition.tp}", _fixed(plan, weights, partition, hidden), page)


def _of_pp(plan: Plan, partition: Partition, hidden: int, layers: int) -> MoreRanks:
    """Stages have about equal times, not equal numbers of layers: one more than their share."""
    most = min(layers, -(-layers // partition.pp) + 1)
    inside: dict[int, int] = {}
    outside = 0
    for spec in plan.model.parameters:
        layer = next((int(part) for part in spec.name.split(".") if part.isdecimal()), None)
        if layer is None:
            outside += spec.nbytes
        else:
            inside[layer] = inside.get(layer, 0) + spec.nbytes
    if plan.parallel.pp > 1:  # another stage may hold the tables
        table = plan.tokens.logits_width * hidden * _STREAM_BYTES // 2
        outside = max(outside, 2 * table // plan.parallel.tp)
    weights = outside + most * max(inside.values(), default=0)
    page = most * max(-(-g.page_bytes // len(g.layers)) for g in plan.kv)
    return MoreRanks(f"--pp {partition.pp}", _fixed(plan, weights, partition, hidden), page)


def _share(spec: WeightSpec, times: int) -> int:
    """Bytes of a weight on a rank that has one in `times` of it."""
    if len(spec.shape) < 2 or (len(spec.shape) == 2 and min(spec.shape) <= _HELD_WHOLE):
        return spec.nbytes
    return -(-spec.nbytes // times) + spec.nbytes // _UNEVEN


def _fixed(plan: Plan, weights: int, partition: Partition, hidden: int) -> int:
    """All but KV: the arena also has rows on their way from and to other ranks.

    Slots for two sums from each other rank, the sum itself, and mail of two steps between stages.
    """
    memory, rows = plan.memory, plan.schedule.max_step_tokens
    crossing = 2 * (partition.tp + 4) * rows * hidden * _STREAM_BYTES
    rest = needed_bytes(plan) - memory.weights_bytes - memory.kv_bytes
    return rest + weights + crossing


def _divides(partition: Partition, model: Divisible) -> bool:
    try:
        check_partition(partition, model)
    except PartitionError:
        return False
    return True


def _first(sizes: dict[str, int], names: tuple[str, ...]) -> int:
    return next((sizes[name] for name in names if sizes.get(name)), 0)
