"""What people ask about a partition besides its rank: operators, Pareto front, fewest devices.

In: a search and its answer. Out: records for tables and plots, and `choose` for the plan.
"""

from dataclasses import dataclass

from sitsc.core.errors import PartitionError
from sitsc.core.parallel import Partition
from sitsc.core.plan import Alternative, Parallel
from sitsc.passes.granularity import link_ranges
from sitsc.passes.op_time import Sizes, op_time
from sitsc.passes.partition import Candidate, Found, Search
from sitsc.passes.prefill_cuts import prefill_cuts
from sitsc.passes.replica_time import LARGEST_CHUNK
from sitsc.passes.workloads import Slo, Workload, counted


@dataclass(frozen=True, slots=True)
class OpShare:
    """An operator of one device in a step: time, how near it is to the limit, which limit.

    `us` and `limit_us` are of all its calls; `source` is where the limit's number comes from.
    """

    name: str
    count: int
    us: float
    limit_us: float
    bound: str
    source: str

    @property
    def share(self) -> float:
        """Of the hardware limit."""
        return self.limit_us / self.us if self.us else 0.0


def op_shares(search: Search, partition: Partition, sizes: Sizes) -> tuple[OpShare, ...]:
    """Operators of all layers in a step, slowest first, with the time of collectives."""
    model, cut = search.model, search.replica(partition).cut(sizes.tokens)
    ceilings = search.machine.data.target.ceilings
    found: dict[str, OpShare] = {}
    comm = 0.0
    parts = [-1, *model.record.layers, -2]
    for index in dict.fromkeys(parts):
        count = parts.count(index)
        for op in model.ops(index):
            time = op_time(op, sizes, cut, model.device)
            comm += count * model.communication(op, sizes, cut)
            peak = f"{op.dtype}_flops"
            reads = time.bytes / ceilings["read_bytes_per_s"].value
            by_reading = peak not in ceilings or reads >= time.flops / ceilings[peak].value
            limit = "read_bytes_per_s" if by_reading else peak
            old = found.get(op.name, OpShare(op.name, 0, 0.0, 0.0, "", ""))
            found[op.name] = OpShare(
                op.name,
                old.count + count,
                old.us + count * time.us,
                old.limit_us + count * time.limit_us,
                "reading" if by_reading else "computing",
                ceilings[limit].source,
            )
    rows = sorted(found.values(), key=lambda row: -row.us)
    if comm > 0:
        where = model.where.inside
        source = next(iter(where.algorithms.values())).source
        rows.append(OpShare("collectives", 1, comm, 0.0, f"link {where.name}", source))
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class Point:
    """A partition at a load: tokens a second of one user, and of all together a device."""

    partition: Partition
    batch: int
    per_user: float
    per_device: float


def points(search: Search, found: Found) -> tuple[Point, ...]:
    """Every candidate at every load that its KV cache holds."""
    made = []
    for c in found.ranked:
        most = search.most_batch(c.budget, found.workload)
        for load in search.loads(c.partition, found.workload, most):
            per_device = load.tokens_per_s / found.devices
            made.append(Point(c.partition, load.batch, 1e3 / load.tpot_ms, per_device))
    return tuple(made)


def pareto(all_points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points that no other beats both for a user and for a device, fastest for users first."""
    front: list[Point] = []
    for one in sorted(all_points, key=lambda p: (-p.per_user, -p.per_device)):
        if not front or one.per_device > front[-1].per_device:
            front.append(one)
    return tuple(front)


def nearest_miss(found: Found) -> Candidate | None:
    """The candidate that misses the limits by least with what was asked for, when some do."""
    return min((c for c in found.ranked if not c.meets), key=lambda c: c.miss, default=None)


def check_slo(found: Found, *, fewer: bool = False) -> None:
    """Raises PartitionError when no candidate keeps the limits, saying how close the best comes.

    With `fewer` it is enough that one keeps them with fewer requests at once than were asked for.
    """
    most = max(found.ranked, key=lambda c: c.holds)
    if found.ranked[0].meets or (fewer and most.holds):
        return
    near = min(found.ranked, key=lambda c: c.miss)
    waiting = f", {near.load.waiting} requests wait" if near.load.waiting else ""
    kept = f"at most {most.holds} at once ({most.partition.text()}), " if most.holds else ""
    raise PartitionError(
        f"no partition of {counted(found.devices, 'device')} keeps {found.slo.text()} with "
        f"{found.workload.asked}: the nearest is {near.partition.text()} with {near.miss:.2f} "
        f"times the limit (TTFT {near.load.ttft_ms:.4g} ms, TPOT {near.load.tpot_ms:.4g} ms with "
        f"{near.load.batch} sequences a replica{waiting})",
        hint=f"{kept}more devices, shorter prompts, or a limit that physics allows",
    )


def fewest_devices(
    search: Search, most: int, workload: Workload, slo: Slo
) -> tuple[int, Candidate] | None:
    """The fewest devices up to `most` that serve a workload within limits, and how; None: none do.

    Tries every count up to 16, then those that divide into nodes or are powers of two.
    """
    per_node = search.machine.where.per_node
    for count in range(1, most + 1):
        if count > 16 and count % per_node and count & (count - 1):
            continue
        try:
            found = search.run(count, workload, slo, flips=False)
        except PartitionError:
            continue
        if found.ranked[0].meets:
            return count, found.ranked[0]
    return None


def choose(
    search: Search, devices: int, workload: Workload | None = None, slo: Slo | None = None
) -> Parallel:
    """The best partition of `devices` as the plan holds it. Raises PartitionError."""
    found = search.run(devices, workload or Workload(), slo or Slo())
    check_slo(found)
    return parallel_of(search, found, found.ranked[0])


def parallel_of(
    search: Search, found: Found, chosen: Candidate, most: int = LARGEST_CHUNK
) -> Parallel:
    """The plan's section for a candidate, all others as alternatives.

    `most` tokens of a prompt fit a step.
    """
    replica, where = search.replica(chosen.partition), search.machine.where
    one = chosen.partition
    ranges = link_ranges(where.inside, min(one.tp, where.per_node))
    if where.between is not None and one.tp > where.per_node:
        ranges += link_ranges(where.between, -(-one.tp // where.per_node))
    return Parallel(
        tp=one.tp,
        pp=one.pp,
        ep=one.ep,
        dp=one.dp,
        micro_batch=chosen.micro_batches,
        chunk_tokens=chosen.chunk_tokens,
        alternatives=tuple(alternatives(found, chosen)),
        stages=chosen.bounds,
        granularity=ranges,
        cuts=prefill_cuts(replica, search.record.max_context, most),
    )


def alternatives(found: Found, chosen: Candidate) -> list[Alternative]:
    """Every other partition: predictions in order of rank, then those refused."""
    made, before = [], True
    for c in found.ranked:
        if c is chosen:
            before = False
            continue
        slower = "not asked for" if before else "slower"
        reason = slower if c.meets else f"{c.miss:.3g} times the limit"
        made.append(
            Alternative(
                *(c.partition.tp, c.partition.pp, c.partition.ep, c.partition.dp),
                feasible=True,
                reason=reason,
                ttft_ms=c.ttft_ms,
                tpot_ms=c.tpot_ms,
                tokens_per_s=c.tokens_per_s,
                kv_tokens=c.kv_tokens,
            )
        )
    for r in found.rejected:
        degrees = (r.partition.tp, r.partition.pp, r.partition.ep, r.partition.dp)
        made.append(Alternative(*degrees, feasible=False, reason=r.reason, change=r.change))
    return made
