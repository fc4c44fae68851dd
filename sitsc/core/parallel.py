"""How a model is cut among ranks: tensor, pipeline, expert and data parallel degrees.

Ranks of one replica are numbered by stage: rank = stage · tp + tp_rank. The ranks of a stage share
attention by TP; `ep` divides `tp` and says in how many groups they share whole experts, inside a
group every expert is cut. `check_partition` says in one line what does not divide, and what would.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from sitsc.core.errors import PartitionError

_MOST = 1024


@dataclass(frozen=True, slots=True)
class Partition:
    """Degrees; `dp` are whole replicas."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.tp * self.pp * self.dp

    def place(self, rank: int) -> "Place":
        """Where a rank stands. Raises PartitionError for a rank that there is not."""
        if not 0 <= rank < self.num_ranks:
            raise PartitionError(
                f"rank {rank} of {self.num_ranks}", hint="ranks are numbered from 0"
            )
        replica, inside = divmod(rank, self.tp * self.pp)
        return Place(replica, *divmod(inside, self.tp))

    def text(self) -> str:
        """ "TP 2 × PP 3": the degrees that are not one."""
        named = (("TP", self.tp), ("PP", self.pp), ("EP", self.ep), ("DP", self.dp))
        return " × ".join(f"{name} {size}" for name, size in named if size > 1) or "one rank"


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's replica, its pipeline stage and its number in the stage."""

    replica: int
    stage: int
    tp_rank: int


@dataclass(frozen=True, slots=True)
class Divisible:
    """What of a model must divide: of each kind of layer once.

    `heads` are (query, KV) pairs, `experts` (count, intermediate size) pairs, `intermediate` sizes
    of dense MLPs. Vocabularies are padded and always divide.
    """

    heads: tuple[tuple[int, int], ...]
    intermediate: tuple[int, ...]
    experts: tuple[tuple[int, int], ...]
    num_layers: int


def fits_heads(tp: int, query: int, kv: int) -> bool:
    """Whether heads divide among `tp` ranks; KV heads are repeated where there are fewer."""
    return query % tp == 0 and (kv % tp == 0 or tp % kv == 0)


def valid_tp(model: Divisible, ep: int = 1) -> tuple[int, ...]:
    """Every TP degree that the model can be cut by, in order."""
    largest = min((query for query, _ in model.heads), default=_MOST)
    return tuple(t for t in range(1, largest + 1) if _tp_reason(t, ep, model) is None)


def _tp_reason(tp: int, ep: int, model: Divisible) -> str | None:
    """What does not divide by `tp`, or None."""
    for query, kv in model.heads:
        if query % tp:
            return f"{query} query heads do not divide by TP {tp}"
        if not fits_heads(tp, query, kv):
            return f"TP {tp} neither divides {kv} KV heads nor is a multiple of them"
    for size in model.intermediate:
        if size % tp:
            return f"an intermediate size of {size} does not divide by TP {tp}"
    if tp % ep == 0:
        for _, size in model.experts:
            if size % (tp // ep):
                return f"experts of an intermediate size of {size} do not divide by TP {tp // ep}"
    return None


def check_partition(partition: Partition, model: Divisible) -> None:
    """Raises PartitionError with the degrees that would do."""
    for name in ("tp", "pp", "ep", "dp"):
        if getattr(partition, name) < 1:
            raise PartitionError(f"{name.upper()} {getattr(partition, name)} is less than 1")
    if partition.ep > 1 and not model.experts:
        raise PartitionError(f"EP {partition.ep} of a model without experts", hint="leave out EP")
    check_shards(partition, model)
    if partition.pp > model.num_layers:
        raise PartitionError(
            f"PP {partition.pp} of {model.num_layers} layers leaves stages without any",
            hint=f"valid PP: 1 to {model.num_layers}",
        )


def check_shards(partition: Partition, model: Divisible) -> None:
    """The same for the ranks of one stage, of which `model` may be a part."""
    _check_ep(partition, model)
    reason = _tp_reason(partition.tp, partition.ep, model)
    if reason is not None:
        valid = ", ".join(map(str, valid_tp(model, partition.ep)))
        raise PartitionError(reason, hint=f"valid TP: {valid}; more devices by PP")


def _check_ep(partition: Partition, model: Divisible) -> None:
    counts = {count for count, _ in model.experts}

    def fits(ep: int) -> bool:
        return partition.tp % ep == 0 and all(count % ep == 0 for count in counts)

    if not fits(partition.ep):
        what = "/".join(map(str, sorted(counts))) or "no"
        raise PartitionError(
            f"EP {partition.ep} must divide TP {partition.tp} and {what} experts",
            hint=f"valid EP: {_list(fits, partition.tp)}",
        )


def _list(fits: Callable[[int], bool], most: int) -> str:
    return ", ".join(str(n) for n in range(1, most + 1) if fits(n))


def even_stages(num_layers: int, pp: int) -> tuple[int, ...]:
    """First layer of each stage, then `num_layers`; sizes differ by one at most."""
    return tuple(stage * num_layers // pp for stage in range(pp + 1))


def check_stages(bounds: tuple[int, ...], num_layers: int) -> None:
    """Raises PartitionError unless bounds are 0 < … < num_layers, one layer a stage at least."""
    rising = all(low < high for low, high in pairwise(bounds))
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != num_layers or not rising:
        raise PartitionError(
            f"stages {list(bounds)} do not cover {num_layers} layers",
            hint=f"first layer of each stage from 0 on, rising, and {num_layers} at the end",
        )
