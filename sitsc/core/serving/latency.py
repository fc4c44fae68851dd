"""What a replay comes to: percentiles, rates, shares. In: a replay. Out: plain numbers.

Percentiles are by the nearest rank: a value that some request had.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sitsc.core.serving.simulator import Replay


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float


@dataclass(frozen=True, slots=True)
class StageUse:
    """Shares of the span, over all replicas: stage busy, its sums over ranks, its link.

    `bubble` is the share of the time with a step in flight in which the stage had nothing to do.
    """

    busy: float
    busiest: float
    comm: float
    send: float
    bubble: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Of all requests and replicas; pages are those of the replica that used most of them."""

    requests: int
    replicas: int
    steps: int
    span_s: float
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    requests_per_s: float
    queue_ms: Percentiles
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    e2e_ms: Percentiles
    stages: tuple[StageUse, ...]
    kv_pages: int
    peak_pages: int
    preemptions: int
    most_waiting: int


def percentiles(seconds: Sequence[float]) -> Percentiles:
    """Of one value or more, in milliseconds."""
    order = sorted(seconds)

    def rank(percent: int) -> float:
        return 1e3 * order[-(-percent * len(order) // 100) - 1]

    return Percentiles(rank(50), rank(90), rank(99), rank(100), 1e3 * sum(order) / len(order))


def summarise(replay: Replay) -> Summary:
    """All figures of a replay."""
    requests = replay.requests
    output = sum(r.output_tokens for r in requests)
    several = [r.tpot for r in requests if r.output_tokens > 1]
    return Summary(
        requests=len(requests),
        replicas=len(replay.replicas),
        steps=sum(r.steps for r in replay.replicas),
        span_s=replay.span,
        prompt_tokens=sum(r.prompt_tokens for r in requests),
        output_tokens=output,
        tokens_per_s=output / replay.span,
        requests_per_s=len(requests) / replay.span,
        queue_ms=percentiles([r.queued for r in requests]),
        ttft_ms=percentiles([r.ttft for r in requests]),
        tpot_ms=percentiles(several or [0.0]),
        e2e_ms=percentiles([r.e2e for r in requests]),
        stages=_stages(replay),
        kv_pages=replay.serving.num_pages,
        peak_pages=max(r.peak_pages for r in replay.replicas),
        preemptions=sum(r.preemptions for r in requests),
        most_waiting=max(r.most_waiting for r in replay.replicas),
    )


def _stages(replay: Replay) -> tuple[StageUse, ...]:
    used = [r for r in replay.replicas if r.steps]
    total = len(replay.replicas) * replay.span
    active = sum(r.active for r in used)
    count = len(used[0].busy)
    found = []
    for stage in range(count):
        busy = sum(r.busy[stage] for r in used)
        send = sum(r.send for r in used) if count > 1 else 0.0
        found.append(
            StageUse(
                busy=min(1.0, busy / total),  # sums of many times round
                busiest=min(1.0, max(r.busy[stage] for r in used) / replay.span),
                comm=sum(r.comm[stage] for r in used) / total,
                send=send / total,
                bubble=max(0.0, 1 - busy / active),
            )
        )
    return tuple(found)
