"""From a model or a plan to a replay of a workload on it: the cost model gives the times.

Part of the pipeline; `sitsc simulate` calls it. Compiles nothing, reads no weight, needs no device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sitsc.core.errors import OptionError, PartitionError, PlanError
from sitsc.core.hardware import load_target
from sitsc.core.parallel import Partition
from sitsc.core.plan import Plan, PrefillCut
from sitsc.core.records import to_value
from sitsc.core.serving.latency import Percentiles, Summary, percentiles, summarise
from sitsc.core.serving.limits import chunks_of, limits_of
from sitsc.core.serving.scheduler import SchedulerLimits, pieces
from sitsc.core.serving.simulator import Arrival, Cost, Serving, replay_prompts, simulate
from sitsc.partition_pipeline import Asked, record_model, searcher
from sitsc.passes.arrivals import REQUESTS, Requests, draw, read_requests
from sitsc.passes.batch_time import BatchTime
from sitsc.passes.collectives import send, topology_of
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.partition import Candidate, Search
from sitsc.passes.plan_time import plan_time
from sitsc.passes.prefill_cuts import cut_for, prefill_cuts
from sitsc.passes.replica_time import HIDDEN_BYTES
from sitsc.passes.workloads import Slo, Workload

__all__ = [
    "REQUESTS",
    "Degrees",
    "Report",
    "Requests",
    "Sizes",
    "draw",
    "of_model",
    "of_plan",
    "read_requests",
    "record_model",
    "report_value",
]

_GPU_BATCH, _CPU_BATCH, _MOST_BATCH = 256, 8, 1024
_CHUNK, _GPU_PAGE, _CPU_PAGE = 2048, 64, 16
_MOST_PROMPTS = 2000  # of which regimes are compared
_GROUPS = ("short", "middle", "long")


@dataclass(frozen=True, slots=True)
class Degrees:
    """The partition to replay; 0 for what is left open, all of them for the best one."""

    tp: int = 0
    pp: int = 0
    ep: int = 0
    dp: int = 0

    @property
    def given(self) -> bool:
        return any((self.tp, self.pp, self.ep, self.dp))

    def partition(self, devices: int) -> Partition:
        """Over `devices` (0: as many as it takes). Raises OptionError when they do not divide."""
        tp, pp, ep = max(1, self.tp), max(1, self.pp), max(1, self.ep)
        dp = self.dp or max(1, devices // (tp * pp))
        if devices and tp * pp * dp != devices:
            raise OptionError(
                f"TP {tp} × PP {pp} × DP {dp} are {tp * pp * dp} devices, not {devices}",
                hint=f"--devices {tp * pp * dp}, or other degrees",
            )
        return Partition(tp, pp, ep, dp)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a scheduler may hold; 0 for the usual."""

    max_batch: int = 0
    chunk_tokens: int = 0
    kv_tokens: int = 0

    def __post_init__(self) -> None:
        """Raises OptionError for sizes that nothing can have."""
        for name, value in (("--max-batch", self.max_batch), ("--chunk", self.chunk_tokens)):
            if value < 0:
                raise OptionError(f"{name} {value}", hint="1 or more, 0 for the usual")
        if self.max_batch > _MOST_BATCH:
            raise OptionError(f"--max-batch {self.max_batch}", hint=f"at most {_MOST_BATCH}")
        if self.kv_tokens < 0:
            raise OptionError(f"--kv-tokens {self.kv_tokens}", hint="0 for what fits, or more")


@dataclass(frozen=True, slots=True)
class Regime:
    """Prompts of a third of the lengths: TTFT when cut by length, and by one fixed chunk."""

    name: str
    low_tokens: int
    high_tokens: int
    prompts: int
    cuts: tuple[str, ...]
    planned_ms: Percentiles
    fixed_ms: Percentiles


@dataclass(frozen=True, slots=True)
class Report:
    """All that `sitsc simulate` tells. `fixed_chunk` is what regimes are held against."""

    model: str
    target: str
    partition: Partition
    times_from: str
    rate: float
    concurrency: int
    serving: Serving
    summary: Summary
    fixed_chunk: int
    regimes: tuple[Regime, ...]


def of_model(
    record: ModelRecord,
    target: str,
    asked: Asked,
    degrees: Degrees,
    sizes: Sizes,
    requests: Requests,
    progress: Callable[[str, float], None] = lambda phase, share: None,
) -> Report:
    """Replay on the partition asked for, else on the best. Raises PartitionError, OptionError."""
    progress("search", 0.0)
    partition = degrees.partition(asked.devices) if degrees.given else None
    if partition is not None:
        asked = replace(asked, devices=partition.num_ranks)
    search = searcher(record, target, asked)
    workload = requests.summary()
    best = _best(search, asked.devices, workload, partition)
    replica = search.replica(best.partition)
    serving = _serving(search, best, sizes)
    cuts = prefill_cuts(replica, record.max_context, serving.limits.prefill_chunk_tokens)
    serving = replace(serving, limits=replace(serving.limits, chunks=chunks_of(cuts)))
    cost = BatchTime(replica)
    progress("replay", 0.0)
    summary = summarise(
        simulate(requests.arrivals, serving, cost, concurrency=requests.concurrency)
    )
    progress("regimes", 0.0)
    own = search.machine.calibration
    return Report(
        model=record.architecture,
        target=target,
        partition=best.partition,
        times_from="ceilings" if own is None else f"cost model calibrated on {own.target}",
        rate=requests.rate,
        concurrency=requests.concurrency,
        serving=serving,
        summary=summary,
        fixed_chunk=serving.limits.prefill_chunk_tokens,
        regimes=compare(requests, cuts, serving, cost),
    )


def of_plan(plan: Plan, replicas: int, requests: Requests) -> Report:
    """Replay on replicas of an artifact's plan. Raises PlanError for one without a scheduler."""
    own = plan.of_rank(0)
    if plan.kind != "decoder" or not own.kv:
        raise PlanError("the plan has no KV pages to serve requests from", hint="a decoder's plan")
    parallel = plan.parallel
    gpu = load_target(plan.target.name).cuda is not None
    limits = limits_of(plan)
    ahead = parallel.pp if gpu else 0
    serving = Serving(limits, own.memory.kv_pages, own.kv[0].page_tokens, replicas, ahead)
    cost = plan_time(plan, _sender(plan))
    summary = summarise(
        simulate(requests.arrivals, serving, cost, concurrency=requests.concurrency)
    )
    return Report(
        model=plan.model.architecture,
        target=plan.target.name,
        partition=Partition(parallel.tp, parallel.pp, parallel.ep, replicas),
        times_from="the plan's predictions",
        rate=requests.rate,
        concurrency=requests.concurrency,
        serving=serving,
        summary=summary,
        fixed_chunk=limits.prefill_chunk_tokens,
        regimes=compare(requests, parallel.cuts, serving, cost),
    )


def _sender(plan: Plan) -> Callable[[int], float]:
    """Seconds in which the hidden state of so many tokens comes to the next stage of a plan."""
    where = topology_of(load_target(plan.target.name), plan.num_ranks)
    width = plan.model.dimensions.get("hidden_size", 0) * HIDDEN_BYTES
    return lambda tokens: 1e-6 * send(tokens * width, where, across=False).us


def report_value(report: Report) -> dict[str, Any]:
    """The report as one JSON value."""
    value = to_value(report)
    if math.isinf(report.rate):  # all at once
        value["rate"] = None
    return value


def _best(
    search: Search, devices: int, workload: Workload, partition: Partition | None
) -> Candidate:
    """The partition to replay. More than it can serve is no reason to refuse it."""
    closed = replace(workload, rate=0.0)
    if partition is None:
        try:
            return search.run(devices, workload, Slo(), flips=False).ranked[0]
        except PartitionError:
            return search.run(devices, closed, Slo(), flips=False).ranked[0]
    made = search.evaluate(partition, closed, Slo())
    if isinstance(made, Candidate):
        return made
    named = made.reason.startswith(f"TP {partition.tp}")
    what = made.reason if named else f"{partition.text()}: {made.reason}"
    raise PartitionError(what, hint=made.change)


def _serving(search: Search, best: Candidate, sizes: Sizes) -> Serving:
    """Limits as a plan would have them: pages of what memory is left, chunk and batch as asked."""
    partition = best.partition
    gpu = search.machine.data.cuda is not None
    batch = sizes.max_batch or (_GPU_BATCH if gpu else _CPU_BATCH)
    context = search.record.max_context
    chunk = min(sizes.chunk_tokens or _CHUNK, context)
    page = _GPU_PAGE if gpu else _CPU_PAGE
    if 0 < sizes.kv_tokens < page:
        raise OptionError(f"--kv-tokens {sizes.kv_tokens}", hint=f"a page has {page} tokens")
    fits = search.replica(partition).budget(search.usable, batch, chunk + batch).kv_tokens
    wanted = min(fits, sizes.kv_tokens or batch * (context + page))
    if wanted < page or sizes.kv_tokens > fits:
        raise PartitionError(
            f"{partition.text()}: memory for {max(0, fits)} KV tokens beside steps of "
            f"{chunk + batch} tokens",
            hint="fewer KV tokens, a smaller --chunk or --max-batch, or more devices",
        )
    ahead = partition.pp if gpu else 0
    limits = SchedulerLimits(
        batch,
        chunk + batch,
        chunk,
        context,
        micro_batches=partition.pp,
        tokens_ahead=ahead > 1,
    )
    return Serving(limits, wanted // page, page, partition.dp, ahead)


# --- regimes --------------------------------------------------------------------------------------


def compare(
    requests: Requests, cuts: tuple[PrefillCut, ...], serving: Serving, cost: Cost
) -> tuple[Regime, ...]:
    """Prompts of one replica cut by their length, as the scheduler does, and all by one chunk.

    Prompts alone, without the tokens that follow; of a closed loop each on idle stages. Empty when
    the plan says nothing.
    """
    if not cuts:
        return ()
    prompts = _share(requests, serving.replicas)
    planned = replay_prompts(prompts, lambda n: pieces(n, cut_for(cuts, n).chunk_tokens), cost)
    chunk = serving.limits.prefill_chunk_tokens
    fixed = replay_prompts(prompts, lambda n: pieces(n, chunk), cost)
    order = sorted(range(len(prompts)), key=lambda i: (prompts[i].prompt_tokens, i))
    found = []
    for index, name in enumerate(_GROUPS):
        part = order[index * len(order) // 3 : (index + 1) * len(order) // 3]
        if not part:
            continue
        lengths = [prompts[i].prompt_tokens for i in part]
        used = dict.fromkeys(_cut_text(cut_for(cuts, n)) for n in lengths)
        found.append(
            Regime(
                name,
                lengths[0],
                lengths[-1],
                len(part),
                tuple(used),
                percentiles([planned[i] for i in part]),
                percentiles([fixed[i] for i in part]),
            )
        )
    return tuple(found)


def _share(requests: Requests, replicas: int) -> list[Arrival]:
    """What one of the replicas gets of an open loop; of a closed one prompts far apart."""
    if requests.concurrency or math.isinf(requests.rate):
        some = requests.arrivals[:_MOST_PROMPTS]
        return [replace(a, at=1e6 * i) for i, a in enumerate(some)]
    return list(requests.arrivals[::replicas][:_MOST_PROMPTS])


def _cut_text(cut: PrefillCut) -> str:
    return f"{cut.how} {cut.chunk_tokens}" if cut.chunk_tokens else cut.how
