"""Full configurations of a model: partition, chunk of prompts, sequences, tokens of the KV pool.

In: a partition search with its question. Out: configurations in the order in which they deserve a
plan, and for the others the reason. The figures are those of `sitsc partition`
(docs/partition.md), with the chunk of prompts as one more choice.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from statistics import fmean

from sitsc.core.golden import Figures, GoldenAsked, GoldenRejected
from sitsc.core.golden_choice import rank_key
from sitsc.core.parallel import Partition
from sitsc.partition_pipeline import Asked, Slo
from sitsc.passes.cuda_planner import DECODE_BUCKETS
from sitsc.passes.op_time import Sizes
from sitsc.passes.partition import Candidate, Found, Search
from sitsc.passes.partition_report import check_slo
from sitsc.passes.replica_time import CHUNKS, Replica

_CHUNKS = (64, 128, *CHUNKS)
_AS_FAST = 0.01  # a smaller chunk wins where it costs no more than this share
_MOST_BATCH, _MOST_KV_TOKENS = 1024, 1 << 26  # of CompileOptions


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration of a replica, with what is predicted for all replicas."""

    partition: Partition
    batch: int
    chunk_tokens: int
    max_context: int
    kv_tokens: int
    figures: Figures
    ttft_error: float
    tpot_error: float

    @property
    def name(self) -> str:
        """ "TP 2 × DP 4, chunk 2048, batch 32"."""
        return _name(self.partition, self.chunk_tokens, self.batch)


@dataclass(frozen=True, slots=True)
class Choice:
    """What the search found: `configs` best first, `order` of partitions by their best.

    `as_fast` are those that lost to a smaller chunk, with its size.
    """

    asked: GoldenAsked
    found: Found
    order: tuple[Partition, ...]
    configs: tuple[Config, ...]
    as_fast: tuple[tuple[Config, int], ...]
    refused: tuple[GoldenRejected, ...]

    @property
    def best(self) -> Config:
        """The best of the best partition."""
        return next(c for c in self.configs if c.partition == self.order[0])


def search_configs(
    search: Search, asked: Asked, stored: GoldenAsked, context: int, page: int
) -> Choice:
    """All configurations; `context` is the longest sequence where memory allows it.

    `stored` is the question as a record has it. Raises PartitionError when nothing can hold the
    model or keep the limits.
    """
    found = search.run(asked.devices, asked.workload, asked.slo, flips=False)
    check_slo(found, fewer=True)  # the batch is one more choice
    configs: list[Config] = []
    refused: list[GoldenRejected] = []
    for candidate in found.ranked:
        for chunk in _chunks(max(asked.workload.lengths), context):
            for batch in _batches(search, candidate, asked):
                made = _config(search, candidate, asked, chunk, batch, context, page)
                if isinstance(made, Config):
                    configs.append(made)
                else:
                    refused.append(made)
    configs.sort(key=lambda c: (*rank_key(c.figures, stored), c.chunk_tokens))
    order = tuple(dict.fromkeys(c.partition for c in configs))
    kept, as_fast = _without_as_fast(configs, stored)
    return Choice(stored, found, order, kept, as_fast, tuple(refused))


def choices(choice: Choice) -> Iterator[Config]:
    """Configurations within the limits, in the order in which they deserve a plan.

    The best; that of another partition; that with fewer sequences, which keeps the limits if the
    best just misses them; that with another chunk; then all others by rank.
    """
    good = [c for c in choice.configs if c.figures.misses(choice.asked) <= 1]
    if not good:
        return
    best = choice.best
    firsts = [next(c for c in good if c.partition == p) for p in choice.order if _has(good, p)]
    own = [c for c in good if c.partition == best.partition]
    fewer = [c for c in own if c.chunk_tokens == best.chunk_tokens and c.batch < best.batch]
    fewer.sort(key=lambda c: -c.batch)
    others = [c for c in own if c.chunk_tokens != best.chunk_tokens and c.batch == best.batch]
    yield from dict.fromkeys([*firsts[:2], *fewer[:1], *others[:1], *firsts, *good])


def rejected_of(choice: Choice, taken: Collection[str]) -> tuple[GoldenRejected, ...]:
    """Why others were not taken: partitions, and what differs from the best in one way."""
    best, found = choice.best, []
    for partition in choice.order[1:]:
        first = next((c for c in choice.configs if c.partition == partition), None)
        found += [] if first is None else [_slower(choice, first)]
    for config in choice.configs:
        if config.partition == best.partition and _near(config, best):
            found.append(_slower(choice, config))
    for config, smaller in choice.as_fast:
        if config.partition == best.partition and config.batch == best.batch:
            found.append(GoldenRejected(config.name, f"chunk {smaller} is as fast", ""))
    found += choice.refused
    for item in choice.found.rejected:
        found.append(GoldenRejected(item.partition.text(), item.reason, item.change))
    return tuple(item for item in dict.fromkeys(found) if item.name not in taken)


def _near(config: Config, best: Config) -> bool:
    """Whether it differs in the chunk or in the batch, and not in both."""
    return (config.chunk_tokens == best.chunk_tokens) != (config.batch == best.batch)


def _has(configs: list[Config], partition: Partition) -> bool:
    return any(c.partition == partition for c in configs)


def _slower(choice: Choice, config: Config) -> GoldenRejected:
    miss, best = config.figures.misses(choice.asked), choice.best.figures
    less = 100 * (1 - config.figures.tokens_per_s / best.tokens_per_s)
    how = f"{less:.1f} % fewer tokens/s" if less > 0 else "no faster for the workload"
    reason = f"{miss:.3g} times the limit" if miss > 1 else how
    return GoldenRejected(config.name, reason, "")


def _name(partition: Partition, chunk: int, batch: int) -> str:
    return f"{partition.text()}, chunk {chunk}, batch {batch}"


# --- what is tried ------------------------------------------------------------------------------


def _chunks(longest: int, context: int) -> list[int]:
    """Chunks up to the first that takes the longest prompt whole."""
    whole = next((c for c in _CHUNKS if c >= longest), _CHUNKS[-1])
    return sorted({min(c, context) for c in _CHUNKS if c <= whole})


def _batches(search: Search, candidate: Candidate, asked: Asked) -> list[int]:
    """Sequences of a replica to try: those of the load, with limits also more and fewer.

    A target that states no memory gets no more than the workload has at once.
    """
    data, workload = search.machine.data, asked.workload
    most = _MOST_BATCH if data.cuda is None else DECODE_BUCKETS[-1]
    if not data.target.memory_bytes:
        most = min(most, workload.concurrency)
    if asked.slo == Slo() or workload.rate > 0:
        return [min(most, candidate.load.batch)]
    most = min(most, search.most_batch(candidate.budget, workload))
    return [load.batch for load in search.loads(candidate.partition, workload, most)]


def _config(
    search: Search,
    candidate: Candidate,
    asked: Asked,
    chunk: int,
    batch: int,
    context: int,
    page: int,
) -> Config | GoldenRejected:
    """One configuration with its figures, or why it cannot be."""
    partition, workload = candidate.partition, asked.workload
    name = _name(partition, chunk, batch)
    budget = search.replica(partition).budget(search.usable, batch, chunk)
    held = min(_MOST_KV_TOKENS, budget.kv_tokens // page * page)
    each = (-(-workload.most_tokens // page) + 1) * page  # one more page: the next token's
    pool = min(held, max(batch * each, -(-context // page) * page))
    if pool < max(workload.most_tokens, batch * workload.mean_tokens):
        reason = f"memory: {held} KV tokens beside a step of {chunk + batch} tokens"
        return GoldenRejected(name, reason, "fewer sequences, or a smaller chunk")
    figures = _figures(search, partition, asked, chunk, batch)
    need = workload.rate * workload.output_tokens
    if figures.tokens_per_s < need:
        reason = f"sustains {figures.tokens_per_s:.4g} of {need:.4g} tokens a second"
        return GoldenRejected(name, reason, "more devices, or a larger chunk")
    errors = candidate.ttft_error, candidate.tpot_error
    return Config(partition, batch, chunk, min(context, pool), pool, figures, *errors)


def _figures(search: Search, partition: Partition, asked: Asked, chunk: int, batch: int) -> Figures:
    """As the partition search has them, with prompts in chunks of `chunk` tokens."""
    replica, load, dp = search.replica(partition), asked.workload, partition.dp
    outputs, step = load.output_tokens, replica.decode(batch, load.context).us
    waits = (batch - 1) * fmean(_period_us(replica, n, chunk) for n in load.lengths)
    first = fmean(_prompt_us(replica, n, chunk) for n in load.lengths)
    cycle = first + waits + outputs * step
    open_or_limited = asked.slo != Slo() or load.rate > 0
    busy = dp if open_or_limited else min(dp, load.concurrency)
    return Figures(
        ttft_ms=_prompt_us(replica, load.prompt_tokens, chunk) / 1e3,
        tpot_ms=step / 1e3,
        loaded_tpot_ms=(step + waits / outputs) / 1e3,
        cycle_ms=cycle / 1e3,
        tokens_per_s=busy * batch * outputs / (1e-6 * cycle),
    )


def _prompt_us(replica: Replica, tokens: int, chunk: int) -> float:
    """A lone prompt; chunks follow each other through the stages."""
    return replica.prefill_with(tokens, min(tokens, chunk)).us


def _period_us(replica: Replica, tokens: int, chunk: int) -> float:
    """What a prompt costs the slowest stage: the time that other sequences wait."""
    worst = [0.0] * replica.partition.pp
    for before in range(0, tokens, chunk):
        sizes = Sizes(min(chunk, tokens - before), 1, 1, before)
        for stage, time in enumerate(replica.stages(sizes)):
            worst[stage] += replica.model.launched_us(time, time.us)
    return max(worst)


def _without_as_fast(
    configs: list[Config], asked: GoldenAsked
) -> tuple[tuple[Config, ...], tuple[tuple[Config, int], ...]]:
    """Configurations in their order, and those that a smaller chunk does as well, with its size.

    The smaller one takes less memory and holds others up for less long.
    """
    lost: dict[Config, int] = {}
    for config in sorted(configs, key=lambda c: c.chunk_tokens):
        mine = config.figures
        for other in configs:
            theirs = other.figures
            alike = (other.partition, other.batch) == (config.partition, config.batch)
            smaller = other.chunk_tokens < config.chunk_tokens and other not in lost
            faster = theirs.ttft_ms <= (1 + _AS_FAST) * mine.ttft_ms
            faster &= theirs.tokens_per_s >= (1 - _AS_FAST) * mine.tokens_per_s
            keeps = theirs.misses(asked) <= 1 or mine.misses(asked) > 1
            if alike and smaller and faster and keeps:
                lost[config] = other.chunk_tokens
                break
    return tuple(c for c in configs if c not in lost), tuple(lost.items())
