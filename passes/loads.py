"""What a workload does to replicas: sequences of each, time between tokens, tokens a second.

In: a replica's times, a workload, the sequences that its KV cache holds. Out: loads by the formulas
of docs/partition.md. Knows nothing of limits or ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

from sitsc.passes.replica_time import Replica
from sitsc.passes.workloads import Workload

_STEPS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MOST_BATCH = _STEPS[-1]  # sequences that a replica may have, as --max-batch


@dataclass(frozen=True, slots=True)
class Load:
    """All replicas under load: `batch` sequences in the fullest, `sequences` in all, ms.

    `ttft_ms` is a prompt alone; `tpot_ms` is that of the slowest replica and includes the prompts
    of others between tokens; `waiting` requests find no room in any KV cache.
    """

    batch: int
    sequences: int
    waiting: int
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float


def even(replica: Replica, dp: int, workload: Workload, batch: int) -> Load:
    """`batch` sequences in each replica at all times, each followed by another when it ends.

    A sequence takes its own prompt, its tokens, and waits for the prompts of the others, each
    of which takes the slowest stage for as long as it needs it.
    """
    outputs = workload.output_tokens
    step = replica.decode(batch, workload.context).us
    waits = (batch - 1) * fmean(replica.prefill_period_us(n) for n in workload.lengths)
    first = fmean(replica.prefill(n).us for n in workload.lengths)
    ttft, tpot = replica.prefill(workload.prompt_tokens).us, step + waits / outputs
    speed = dp * batch * outputs / (1e-6 * (first + waits + outputs * step))
    return Load(batch, dp * batch, 0, ttft / 1e3, tpot / 1e3, speed)


def closed(replica: Replica, dp: int, workload: Workload, most: int) -> Load:
    """So many requests at once, shared out: some replicas have one sequence more than the others.

    Those beyond `most` in each replica wait.
    """
    held = min(workload.concurrency, dp * most)
    fewer, more = divmod(held, dp)
    parts = [(fewer + 1, more), (fewer, dp - more)]
    loads = [even(replica, n, workload, batch) for batch, n in parts if n and batch]
    return Load(
        loads[0].batch,
        held,
        workload.concurrency - held,
        loads[0].ttft_ms,
        max(load.tpot_ms for load in loads),
        sum(load.tokens_per_s for load in loads),
    )


def rising(replica: Replica, dp: int, workload: Workload, most: int) -> list[Load]:
    """The loads of more and more sequences, up to `most` in each replica."""
    steps = [step for step in _STEPS if step < most] + [most]
    return [even(replica, dp, workload, batch) for batch in steps]


def first(
    replica: Replica, dp: int, workload: Workload, most: int, holds: Callable[[Load], bool]
) -> Load | None:
    """The load of the fewest sequences for which something holds; None where it never does.

    Of those that are tried with more and more, then halved between that and the one before it.
    """
    loads = rising(replica, dp, workload, most)
    at = next((i for i, load in enumerate(loads) if holds(load)), None)
    if at is None:
        return None
    low, found = loads[at - 1].batch if at else 0, loads[at]
    while found.batch - low > 1:
        middle = even(replica, dp, workload, (low + found.batch) // 2)
        if holds(middle):
            found = middle
        else:
            low = middle.batch
    return found


def opened(replica: Replica, dp: int, workload: Workload, most: int) -> Load | None:
    """The load that a rate of requests comes to; None when it is more than can be served.

    An open loop keeps rate · time of a request sequences in flight (Little's law): the fewest in
    each replica that give as many tokens a second as come in.
    """
    need = workload.rate * workload.output_tokens
    found = first(replica, dp, workload, most, lambda load: load.tokens_per_s >= need)
    return None if found is None else replace(found, tokens_per_s=need)


def most_kept(
    replica: Replica, dp: int, workload: Workload, most: int, keeps: Callable[[Load], bool]
) -> int:
    """The most requests at once up to which every load is kept; 0 when one is too many."""
    beyond = first(replica, dp, workload, most, lambda load: not keeps(load))
    return dp * (most if beyond is None else beyond.batch - 1)


def sustained(replica: Replica, dp: int, workload: Workload, most: int) -> float:
    """The most requests a second that replicas serve, with the best number of sequences."""
    loads = rising(replica, dp, workload, most)
    return max(load.tokens_per_s for load in loads) / workload.output_tokens
