"""Times of one replica under a partition: a token, a prompt, many requests; and its memory.

In: a step model and the degrees. Out: TTFT, TPOT and KV tokens by the formulas of
docs/partition.md. Stages are cut by predicted time; micro-batches and chunks are searched.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean

from sitsc.core.parallel import Partition
from sitsc.passes.collectives import SUM_BYTES, all_reduce, send
from sitsc.passes.granularity import best_size, decode_period_us, overlapped, pipelined_us
from sitsc.passes.model_record import ATTENTION
from sitsc.passes.op_time import Cut, Sizes, kv_heads_of
from sitsc.passes.stage_search import layer_graph, stage_bounds
from sitsc.passes.step_time import StepModel, Time

HIDDEN_BYTES = 4  # the residual stream travels between stages as it is: float32
CHUNKS = (256, 512, 1024, 2048, 4096, 8192)
LARGEST_CHUNK = CHUNKS[-1]
_LOGIT_BYTES = 4
_MOST_TOKENS = 1 << 40  # KV tokens of a target without a stated size
_OVERLAP_STEP = 256


@dataclass(frozen=True, slots=True)
class Span:
    """A time with what of it is communication, and what was chosen to get it."""

    us: float
    comm_us: float
    pieces: int
    piece_tokens: int
    bubble: float = 0.0


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of the fullest device: weights, working memory, what it has; and KV tokens left.

    `kv_tokens` is that of the whole replica: the fewest of its stages.
    """

    weights: float
    working: float
    limit: float
    kv_bytes_per_token: float
    kv_tokens: int


class Replica:
    """Times of one replica; remembers what it was asked.

    `hops` says which hops from stage to stage, and back to the first, go to another node.
    """

    def __init__(
        self,
        model: StepModel,
        partition: Partition,
        hops: tuple[bool, ...] = (),
        *,
        overlap: bool = False,
    ) -> None:
        self.model, self.partition, self.overlap = model, partition, overlap
        self.hops = hops or (False,) * partition.pp
        self.layers = model.record.num_layers
        self.bounds = self._bounds()
        pairs = zip(self.bounds, self.bounds[1:], strict=False)
        self._held = [self._stage_memory(low, high) for low, high in pairs]
        self.decode = lru_cache(maxsize=4096)(self._decode)
        self.prefill = lru_cache(maxsize=4096)(self._prefill)
        self.prefill_period_us = lru_cache(maxsize=4096)(self._prefill_period_us)

    def cut(self, tokens: int) -> Cut:
        """How a step of so many tokens is cut."""
        ep = self.partition.ep
        return Cut(self.partition.tp, ep, imbalance(self.model, tokens, ep))

    def _bounds(self) -> tuple[int, ...]:
        pp = self.partition.pp
        if pp == 1:
            return (0, self.layers)
        sizes = Sizes(32, 32, 32, 1024)
        cut = self.cut(32)
        part = self.model
        layers = [part.layer(i, sizes, cut).us for i in range(self.layers)]
        first = part.stage(0, 1, sizes, cut).us - layers[0]
        last = part.stage(self.layers - 1, self.layers, sizes, cut).us - layers[-1]
        if self.layers == 1:
            return (0, 1)
        return stage_bounds(layer_graph(layers, first, last), pp)

    def stages(self, sizes: Sizes) -> list[Time]:
        """One step of each stage."""
        cut = self.cut(sizes.tokens)
        pairs = zip(self.bounds, self.bounds[1:], strict=False)
        return [self.model.stage(low, high, sizes, cut) for low, high in pairs]

    def send_us(self, tokens: int, *, round_trip: bool = False) -> float:
        """The hidden state of so many tokens to the next stage; each rank sends to its peer.

        The mean over the bounds, `round_trip` with the way back: whatever waits for a stage passes
        every bound before it once, so that the sum is what counts.
        """
        if self.partition.pp == 1:
            return 0.0
        nbytes = tokens * self.model.record.hidden * HIDDEN_BYTES
        hops = self.hops if round_trip else self.hops[:-1]
        return fmean(send(nbytes, self.model.where, across=across).us for across in hops)

    # --- decode -------------------------------------------------------------------------------

    def _decode(self, batch: int, context: int) -> Span:
        """Between two tokens of a sequence of `batch`; the best number of micro-batches."""
        found: Span | None = None
        pp = self.partition.pp
        for count in sorted({1, min(batch, pp), min(batch, 2 * pp)}):
            span = self._decode_with(batch, context, count)
            if found is None or span.us < found.us:
                found = span
        assert found is not None
        return found

    def _decode_with(self, batch: int, context: int, count: int) -> Span:
        rows = -(-batch // count)
        stages = self.stages(Sizes(rows, rows, rows, context))
        times = [t.us for t in stages]
        us = decode_period_us(times, self.send_us(rows, round_trip=True), count)
        busy = count * sum(times) / (len(times) * us)
        comm = sum(t.comm_us for t in stages) + us - max(sum(times), count * max(times))
        return Span(us, min(us, max(0.0, comm)), count, rows, max(0.0, 1 - busy))

    # --- prefill ------------------------------------------------------------------------------

    def _prefill(self, tokens: int) -> Span:
        """A prompt of one sequence; the best size of its chunks."""
        sizes = {c for c in CHUNKS if c < tokens}
        if tokens <= LARGEST_CHUNK:
            sizes.add(tokens)
        if self.partition.pp == 1:
            sizes = {max(sizes)}
        spans = [self.prefill_with(tokens, size) for size in sorted(sizes)]
        return min(spans, key=lambda s: s.us)

    def prefill_with(self, tokens: int, chunk: int) -> Span:
        """A prompt in chunks of `chunk` tokens, one behind the other through the stages."""
        times, comm = [], 0.0
        for before in range(0, tokens, chunk):
            now = min(chunk, tokens - before)
            sizes = Sizes(now, 1, 1, before)
            stages = self.stages(sizes)
            exposed = [self._exposed(i, sizes, t) for i, t in enumerate(stages)]
            pairs = zip(stages, exposed, strict=True)
            times.append([self.model.launched_us(t, us) for t, us in pairs])
            comm += sum(t.comm_us for t in stages)
        us = pipelined_us(times, self.send_us(min(chunk, tokens)))
        busy = sum(map(sum, times)) / (len(self.bounds) - 1) / us
        return Span(us, min(us, comm), len(times), min(chunk, tokens), max(0.0, 1 - busy))

    def _exposed(self, stage: int, sizes: Sizes, time: Time) -> float:
        """With overlap, the sums of one piece travel while the next piece is computed."""
        tokens, where, tp = sizes.tokens, self.model.where, self.partition.tp
        if not self.overlap or time.reducible_us <= 0 or tokens < 2 * _OVERLAP_STEP:
            return time.us
        row = self.model.record.hidden * SUM_BYTES
        whole = all_reduce(float(tokens * row), tp, where).us
        low, high = self.bounds[stage], self.bounds[stage + 1]

        def compute(count: int) -> float:
            now = Sizes(count, min(1, sizes.rows), 1, sizes.context)
            return self.model.stage(low, high, now, self.cut(count)).compute_us

        def comm(count: int) -> float:
            return time.reducible_us * all_reduce(float(count * row), tp, where).us / whole

        fixed = 1e-6 * (compute(_OVERLAP_STEP) - compute(tokens) * _OVERLAP_STEP / tokens)
        per_byte = 1e-6 * time.reducible_us / (tokens * row)
        begin = best_size(float(tokens * row), tp, max(0.0, fixed), per_byte) / row
        found = overlapped(tokens, compute, comm, begin, _OVERLAP_STEP)
        return min(time.us, found.us + time.comm_us - time.reducible_us)

    def _prefill_period_us(self, tokens: int) -> float:
        """What a prompt costs the slowest stage: the time that other work of it waits."""
        chunk = min(tokens, LARGEST_CHUNK)
        worst = [0.0] * self.partition.pp
        for before in range(0, tokens, chunk):
            now = min(chunk, tokens - before)
            for stage, t in enumerate(self.stages(Sizes(now, 1, 1, before))):
                worst[stage] += self.model.launched_us(t, t.us)
        return max(worst)

    # --- memory -------------------------------------------------------------------------------

    def budget(self, memory_bytes: float, batch: int, chunk: int) -> Budget:
        """The memory of the fullest device; KV tokens are those that the fullest stage can keep.

        Working memory: the widest operator's values for the largest step, the stream, and logits.
        """
        found = []
        for weights, per_token, wide, last in self._held:
            rows = (chunk + batch) * wide
            working = rows + last * batch * self.model.record.vocabulary * _LOGIT_BYTES
            free = memory_bytes - weights - working
            tokens = int(min(free / per_token if per_token else math.inf, _MOST_TOKENS))
            found.append(Budget(weights, working, memory_bytes, per_token, tokens))
        return min(found, key=lambda b: b.kv_tokens)

    def _stage_memory(self, low: int, high: int) -> tuple[float, float, float, bool]:
        """Bytes of weights, of a token's keys and values, of a row's values; is it the last."""
        record, cut = self.model.record, Cut(self.partition.tp, self.partition.ep)
        per_token = wide = 0.0
        for index in record.layers[low:high]:
            for op in record.classes[index]:
                wide = max(wide, op.in_bytes + op.out_bytes)
                if op.kind == ATTENTION and op.heads is not None:
                    h = op.heads
                    per_token += 2 * kv_heads_of(h, self.partition.tp) * h.dim * h.itemsize
        wide += 2 * record.hidden * HIDDEN_BYTES
        return self.model.weight_bytes(low, high, cut), per_token, wide, high == self.layers


def imbalance(model: StepModel, tokens: int, ep: int) -> float:
    """How many times the mean the busiest of `ep` groups of experts gets, of `tokens`.

    Choices as likely as each other: the largest of ep near-normal counts of mean n lies
    sqrt(2·ln(ep) / n) above it. Rounded, so that near counts share an answer.
    """
    shapes = model.record.experts()
    if ep == 1 or not shapes:
        return 1.0
    mean = max(1.0, tokens * shapes[0].top_k / ep)
    return min(float(ep), round(1 + math.sqrt(2 * math.log(ep) / mean), 2))
