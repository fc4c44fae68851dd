"""The partition search: every (TP, PP, EP, DP) of N devices, predicted, ranked or refused.

In: a model's record on a target with its links, a workload, limits. Out: candidates in order, and
for each that cannot be the reason and the smallest change. Compiles nothing; `choose` gives what
the plan holds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sitsc.core.calibration import Calibration, calibration_for, measured_error
from sitsc.core.errors import PartitionError
from sitsc.core.hardware import TargetData
from sitsc.core.parallel import Divisible, Partition, check_partition
from sitsc.passes.collectives import Topology
from sitsc.passes.loads import MOST_BATCH, Load, closed, most_kept, opened, rising, sustained
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.op_time import Device, device_of
from sitsc.passes.placement import crossing, misplaced
from sitsc.passes.replica_time import LARGEST_CHUNK, Budget, Replica, Span
from sitsc.passes.step_time import StepModel
from sitsc.passes.workloads import Slo, Workload, counted

RESERVED = 0.06  # of a device's memory: the driver, libraries, graphs, what the allocator loses


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partition that can be, with what it is predicted to reach.

    `ttft_ms` is for the middle prompt on an idle replica, `tpot_ms` between tokens of a full batch
    without prompts; `load` adds them. `miss` is how many times over its limits `load` is, `holds`
    the most requests at once that keep them (0: not asked, or none do).
    """

    partition: Partition
    bounds: tuple[int, ...]
    micro_batches: int
    chunk_tokens: int
    batch: int
    ttft_ms: float
    tpot_ms: float
    ttft_error: float
    tpot_error: float
    comm_share: float
    bubble: float
    kv_tokens: int
    budget: Budget
    load: Load
    miss: float
    holds: int

    @property
    def meets(self) -> bool:
        """Whether what was asked for is served within the limits."""
        return self.miss <= 1

    @property
    def tokens_per_s(self) -> float:
        """What ranks candidates that keep the limits."""
        return self.load.tokens_per_s


@dataclass(frozen=True, slots=True)
class Rejected:
    """A partition that cannot be: the constraint that fails, and the smallest change."""

    partition: Partition
    reason: str
    change: str
    rate: float = 0.0  # requests a second that it sustains, where those are too few


@dataclass(frozen=True, slots=True)
class Flip:
    """From so many requests at once on, this partition is the fastest."""

    concurrency: int
    partition: Partition


@dataclass(frozen=True, slots=True)
class Found:
    """The answer: candidates best first, what was refused, where the choice flips."""

    devices: int
    workload: Workload
    slo: Slo
    ranked: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    flips: tuple[Flip, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and links to search on."""

    data: TargetData
    calibration: Calibration | None
    device: Device
    where: Topology
    overlap: bool = False


def machine(data: TargetData, where: Topology, *, overlap: bool = False) -> Machine:
    """A target with its calibration; GPUs without one get the shares of the reference."""
    found = calibration_for(data)
    return Machine(data, found, device_of(data, found), where, overlap)


def degrees(devices: int, experts: bool) -> Iterable[Partition]:
    """Every partition of exactly `devices`; EP divides TP."""
    for tp in _divisors(devices):
        for pp in _divisors(devices // tp):
            for ep in _divisors(tp) if experts else [1]:
                yield Partition(tp, pp, ep, devices // tp // pp)


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def divisible_of(record: ModelRecord) -> Divisible:
    """What must divide, from the record: heads, intermediate sizes, experts, layers."""
    heads = tuple(sorted({(h.heads, h.kv_heads) for h in record.attention()}))
    experts = tuple((e.experts, e.intermediate) for e in record.experts())
    inner = {op.columns for ops in record.classes for op in ops if op.inner}
    return Divisible(heads, tuple(sorted(inner)), experts, record.num_layers)


class Search:
    """All partitions of one model on one machine; replicas are remembered between questions."""

    def __init__(self, record: ModelRecord, where: Machine) -> None:
        self.record, self.machine = record, where
        self.model = StepModel(record, where.device, where.where)
        self.divides = divisible_of(record)
        self._replicas: dict[tuple[Partition, tuple[bool, ...]], Replica] = {}

    def replica(self, partition: Partition) -> Replica:
        """One replica of a partition; DP changes nothing about it but where its stages stand."""
        key = one, hops = replace(partition, dp=1), crossing(partition, self.machine.where)
        if key not in self._replicas:
            self._replicas[key] = Replica(self.model, one, hops, overlap=self.machine.overlap)
        return self._replicas[key]

    def run(self, devices: int, workload: Workload, slo: Slo, *, flips: bool = True) -> Found:
        """Rank all partitions of `devices`. Raises PartitionError when none can be."""
        ranked: list[Candidate] = []
        rejected: list[Rejected] = []
        for partition in degrees(devices, bool(self.record.experts())):
            made = self.evaluate(partition, workload, slo)
            if isinstance(made, Candidate):
                ranked.append(made)
            else:
                rejected.append(made)
        if not ranked:
            those = counted(devices, "device")
            slow = max(rejected, key=lambda r: r.rate)
            if slow.rate:
                raise PartitionError(
                    f"no partition of {those} serves {workload.rate:.3g} requests a "
                    f"second: {slow.partition.text()} comes nearest with {slow.rate:.3g}",
                    hint="more devices, or fewer requests",
                )
            first = min(rejected, key=lambda r: (not r.change, r.partition.pp, -r.partition.tp))
            raise PartitionError(
                f"no partition of {those} can hold {self.record.architecture}: "
                f"{first.partition.text()}: {first.reason}",
                hint=first.change or "more devices",
            )
        ranked.sort(key=lambda c: (not c.meets, -c.tokens_per_s if c.meets else c.miss, c.tpot_ms))
        turns = self.flips([c.partition for c in ranked], workload) if flips else ()
        return Found(devices, workload, slo, tuple(ranked), tuple(rejected), turns)

    # --- one partition ------------------------------------------------------------------------

    def evaluate(
        self, partition: Partition, workload: Workload, slo: Slo
    ) -> "Candidate | Rejected":
        """Predict a partition, or say why it cannot be."""
        try:
            check_partition(replace(partition, dp=1), self.divides)
        except PartitionError as error:
            return Rejected(partition, error.what, error.hint)
        if (why := misplaced(partition, self.machine.where)) is not None:
            return Rejected(partition, *why)
        replica = self.replica(partition)
        budget = self._budget(replica, partition.dp, workload)
        if (refused := self._memory(partition, budget, workload)) is not None:
            return refused
        most = self.most_batch(budget, workload)
        arrive = opened if workload.rate > 0 else closed
        if (load := arrive(replica, partition.dp, workload, most)) is None:
            rate = sustained(replica, partition.dp, workload, most)
            reason = f"sustains {rate:.3g} of {workload.rate:.3g} requests a second"
            return Rejected(partition, reason, "more devices", rate)
        return self._candidate(partition, replica, budget, workload, slo, load, most)

    def _budget(self, replica: Replica, dp: int, workload: Workload) -> Budget:
        """Memory beside steps of all sequences that come, as far as the KV cache holds them."""
        chunk = min(LARGEST_CHUNK, max(workload.lengths))
        most = self.most_batch(replica.budget(self.usable, 1, chunk), workload)
        asked = most if workload.rate > 0 else math.ceil(workload.concurrency / dp)
        return replica.budget(self.usable, min(most, asked), chunk)

    @property
    def usable(self) -> float:
        """Bytes of a device that a plan may take; a target without a size has no limit."""
        size = self.machine.data.target.memory_bytes
        return size * (1 - RESERVED) if size else math.inf

    def _candidate(
        self,
        partition: Partition,
        replica: Replica,
        budget: Budget,
        workload: Workload,
        slo: Slo,
        load: Load,
        most: int,
    ) -> Candidate:
        decode = replica.decode(load.batch, workload.context)
        prefill = replica.prefill(workload.prompt_tokens)
        miss, holds = self._kept(replica, partition.dp, workload, slo, load, most)
        return Candidate(
            partition=partition,
            bounds=replica.bounds,
            micro_batches=decode.pieces,
            chunk_tokens=prefill.piece_tokens,
            batch=load.batch,
            ttft_ms=prefill.us / 1e3,
            tpot_ms=decode.us / 1e3,
            ttft_error=self._error(partition, prefill, "ttft"),
            tpot_error=self._error(partition, decode, "tpot"),
            comm_share=decode.comm_us / decode.us,
            bubble=decode.bubble,
            kv_tokens=budget.kv_tokens * partition.dp,
            budget=budget,
            load=load,
            miss=miss,
            holds=holds,
        )

    def _error(self, partition: Partition, span: Span, kind: str) -> float:
        """Residuals of computing and of links by their shares of the time, or those of ranks.

        Where partitions of several ranks were measured, whatever is the worst of such.
        """
        data, share = self.machine.data, span.comm_us / span.us
        links = self.machine.where.inside.error
        if self.machine.where.between is not None:
            links = max(links, self.machine.where.between.error)
        mixed = measured_error(data, kind) * (1 - share) + links * share
        if partition.tp * partition.pp == 1:
            return mixed
        return max(mixed, measured_error(data, kind, partition.tp, partition.pp))

    def _memory(self, partition: Partition, budget: Budget, workload: Workload) -> Rejected | None:
        """Refused when weights, working memory and one sequence do not fit a device."""
        need = workload.most_tokens
        if budget.kv_tokens >= need:
            return None
        wanted = budget.weights + budget.working + need * budget.kv_bytes_per_token
        reason = (
            f"memory: {_gb(wanted)} a device (weights {_gb(budget.weights)}, KV of one sequence "
            f"of {need} tokens {_gb(need * budget.kv_bytes_per_token)}), {_gb(budget.limit)} usable"
        )
        return Rejected(partition, reason, self._roomier(partition, workload))

    def _roomier(self, partition: Partition, workload: Workload) -> str:
        """The smallest number of devices of a replica that would hold it."""
        size = partition.tp * partition.pp
        for more in range(size + 1, 64 * size + 1):
            for tp in _divisors(more):
                other = Partition(tp, more // tp, min(partition.ep, tp), 1)
                try:
                    check_partition(other, self.divides)
                except PartitionError:
                    continue
                budget = self.replica(other).budget(
                    self.usable, 1, min(LARGEST_CHUNK, max(workload.lengths))
                )
                if budget.kv_tokens >= workload.most_tokens:
                    return f"{other.text()} ({more} devices a replica), or weights of fewer bits"
        return "weights of fewer bits, or devices with more memory"

    # --- load ---------------------------------------------------------------------------------

    def most_batch(self, budget: Budget, workload: Workload) -> int:
        """Sequences that the KV cache of a replica holds."""
        return max(1, min(MOST_BATCH, int(budget.kv_tokens / workload.mean_tokens)))

    def loads(self, partition: Partition, workload: Workload, most: int) -> list[Load]:
        """The loads of more and more sequences, up to `most` in a replica."""
        return rising(self.replica(partition), partition.dp, workload, most)

    def _kept(
        self, replica: Replica, dp: int, workload: Workload, slo: Slo, load: Load, most: int
    ) -> tuple[float, int]:
        """How many times over its limits a load is, and the most requests at once that keep them.

        Requests that find no room are over by how many times more there are than are served.
        """
        if slo == Slo():
            return 0.0, 0
        miss = slo.misses(load.ttft_ms, load.tpot_ms)
        if load.waiting:
            miss = max(miss, workload.concurrency / load.sequences)
        if workload.rate > 0:
            return miss, 0

        def keeps(one: Load) -> bool:
            return slo.misses(one.ttft_ms, one.tpot_ms) <= 1

        holds = most_kept(replica, dp, workload, most, keeps)
        return miss, max(holds, load.sequences if miss <= 1 else 0)

    # --- over many ----------------------------------------------------------------------------

    def flips(self, partitions: list[Partition], workload: Workload) -> tuple[Flip, ...]:
        """Where another partition becomes the fastest as more requests come at once."""
        unlimited = replace(workload, rate=0.0)

        def best(concurrency: int) -> Partition:
            asked = replace(unlimited, concurrency=concurrency)
            return max(partitions, key=lambda p: self._speed(p, asked))

        found = [Flip(1, best(1))]
        last = 1
        for now in [1 << i for i in range(1, 11)]:
            if (new := best(now)) != found[-1].partition:
                low, high = last, now
                while high - low > 1:
                    middle = (low + high) // 2
                    if best(middle) == found[-1].partition:
                        low = middle
                    else:
                        high = middle
                found.append(Flip(high, new if high == now else best(high)))
            last = now
        return tuple(found)

    def _speed(self, partition: Partition, workload: Workload) -> float:
        replica = self.replica(partition)
        most = self.most_batch(self._budget(replica, partition.dp, workload), workload)
        return closed(replica, partition.dp, workload, most).tokens_per_s


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
