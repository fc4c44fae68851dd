"""A workload replayed by the scheduler and the page pool over a virtual clock: no model, no device.

In: arrivals, what each replica may hold, what a step costs. Out: when every request began, got its
first and its last token, and how long stages and links were busy. `Scheduler` forms the batches at
the moments at which the engine would ask it to; nothing here chooses tokens. Times are seconds.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sitsc.core.errors import CapacityError, OptionError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.kv_blocks import PagePool
from sitsc.core.serving.scheduler import Scheduler, SchedulerLimits


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a workload; of a closed loop, `at` only says the order."""

    at: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of a prompt in a step, after `context` others; `sampled` if they are its last."""

    tokens: int
    context: int
    sampled: bool


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """A step: `decode` sequences of one token with `decode_context` tokens in all, and prompts."""

    decode: int
    decode_context: int
    pieces: tuple[Piece, ...] = ()

    @property
    def tokens(self) -> int:
        """New tokens of the step."""
        return self.decode + sum(piece.tokens for piece in self.pieces)

    @property
    def rows(self) -> int:
        """Tokens that are sampled."""
        return self.decode + sum(piece.sampled for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of each stage, of which `comm` are sums over its ranks; `send` to the next stage.

    The tokens take as long from the last stage back to the first.
    """

    stages: tuple[float, ...]
    comm: tuple[float, ...]
    send: float = 0.0


Cost = Callable[[BatchSizes], StepCost]
Observer = Callable[[int, StepBatch], None]


@dataclass(frozen=True, slots=True)
class Serving:
    """Replicas alike: each has a scheduler and pages of its own.

    `num_ahead` steps may be scheduled before the one before them is read, as on GPUs.
    """

    limits: SchedulerLimits
    num_pages: int
    page_tokens: int
    replicas: int = 1
    num_ahead: int = 0

    @property
    def context_tokens(self) -> int:
        """Tokens of one request, prompt and answer."""
        return min(self.limits.max_context, self.num_pages * self.page_tokens)

    @property
    def in_flight(self) -> int:
        """Steps of a replica in flight at most."""
        return max(1 + self.num_ahead, self.limits.micro_batches)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came, was first part of a step, got its first token and its last."""

    replica: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    arrived: float
    started: float
    first: float
    ended: float

    @property
    def queued(self) -> float:
        return self.started - self.arrived

    @property
    def ttft(self) -> float:
        return self.first - self.arrived

    @property
    def tpot(self) -> float:
        """Between two tokens on average; 0 for an answer of one token."""
        return (self.ended - self.first) / max(1, self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended - self.arrived


@dataclass(frozen=True, slots=True)
class ReplicaUse:
    """What one replica did; seconds are sums. `active`: with a step in flight."""

    requests: int
    steps: int
    active: float
    busy: tuple[float, ...]  # [stages]
    comm: tuple[float, ...]  # [stages]
    send: float  # of each link between stages
    peak_pages: int
    most_waiting: int


@dataclass(frozen=True, slots=True)
class Replay:
    """All of a replay; `requests` in the order in which they came, `span` from first to last."""

    serving: Serving
    requests: tuple[RequestTimes, ...]
    replicas: tuple[ReplicaUse, ...]
    span: float


def simulate(
    arrivals: Sequence[Arrival],
    serving: Serving,
    cost: Cost,
    *,
    concurrency: int = 0,
    observe: Observer | None = None,
) -> Replay:
    """Replay a workload; with `concurrency` a request comes when another ends, so many at once.

    `observe` is called with the replica and each batch. Raises OptionError for no requests,
    CapacityError for one that no replica can hold.
    """
    _check(arrivals, serving)
    return _Replayer(arrivals, serving, cost, concurrency, observe).run()


def replay_prompts(
    arrivals: Sequence[Arrival], pieces_of: Callable[[int], Sequence[int]], cost: Cost
) -> list[float]:
    """Seconds to the first token of each prompt, alone in its steps and one behind the other.

    `pieces_of` says how a prompt of so many tokens is cut. Pieces of later prompts follow in the
    stages, each of which does one at a time.
    """
    free: list[float] = []
    found = []
    for arrival in arrivals:
        context, last = 0, 0.0
        for tokens in pieces_of(arrival.prompt_tokens):
            sampled = context + tokens == arrival.prompt_tokens
            step = cost(BatchSizes(0, 0, (Piece(tokens, context, sampled),)))
            free = free or [0.0] * len(step.stages)
            last = _through(step, free, arrival.at)
            context += tokens
        assert context == arrival.prompt_tokens, "the pieces are not the prompt"
        found.append(last - arrival.at)
    return found


def sizes_of(batch: StepBatch) -> BatchSizes:
    """What of a batch its cost depends on. The last token of a prompt alone counts as decode."""
    if batch.regime == "decode":
        return BatchSizes(batch.num_seqs, sum(batch.context_lens))
    decode = total = 0
    pieces = []
    for i, (context, sampled) in enumerate(zip(batch.context_lens, batch.sample, strict=True)):
        tokens = batch.query_start[i + 1] - batch.query_start[i]
        if tokens == 1 and sampled:
            decode, total = decode + 1, total + context
        else:
            pieces.append(Piece(tokens, context, sampled))
    return BatchSizes(decode, total, tuple(pieces))


def _through(step: StepCost, free: list[float], ready: float) -> float:
    """Take a step through the stages, `free` from then on; when it leaves the last."""
    for stage, seconds in enumerate(step.stages):
        free[stage] = max(ready, free[stage]) + seconds
        ready = free[stage] + step.send
    return free[-1]


def _check(arrivals: Sequence[Arrival], serving: Serving) -> None:
    if not arrivals:
        raise OptionError("a workload without requests", hint="at least one")
    room = serving.context_tokens
    for index, arrival in enumerate(arrivals):
        if min(arrival.prompt_tokens, arrival.output_tokens) < 1:
            raise OptionError(f"request {index} has no prompt or no output", hint="1 token or more")
        if arrival.prompt_tokens + arrival.output_tokens > room:
            larger = "--max-context" if room == serving.limits.max_context else "--kv-tokens"
            raise CapacityError(
                f"request {index} has {arrival.prompt_tokens} + {arrival.output_tokens} tokens, "
                f"the context holds {room}",
                hint=f"shorter ones (--prompt, --output or --workload), or a larger {larger}",
            )


@dataclass(frozen=True, slots=True)
class _Flight:
    batch: StepBatch
    emitted: float  # its tokens are known to users
    settled: float  # and to the first stage


class _Replica:
    """One scheduler, its stages, and who of the workload its requests are."""

    def __init__(self, serving: Serving, cost: Cost) -> None:
        self.pages = PagePool(serving.num_pages, serving.page_tokens)
        self.scheduler = Scheduler(serving.limits, self.pages)
        self.cost, self.most = cost, serving.in_flight
        self.flights: deque[_Flight] = deque()
        self.who: dict[int, int] = {}  # request id → place in the workload
        self.fresh: set[int] = set()  # request ids that no step had yet
        self.silent: set[int] = set()  # request ids without a token
        self.free: list[float] = []
        self.busy: list[float] = []
        self.comm: list[float] = []
        self.send = self.active = self.since = 0.0
        self.steps = self.peak = self.waiting = 0

    def add(self, index: int, arrival: Arrival, options: SamplingOptions) -> None:
        request = self.scheduler.add([0] * arrival.prompt_tokens, options)
        self.who[request.id] = index
        self.fresh.add(request.id)
        self.silent.add(request.id)

    def next_step(self, now: float) -> StepBatch | None:
        """Schedule a step and take it through the stages, if there is room for one in flight."""
        if len(self.flights) >= self.most:
            return None
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        step = self.cost(sizes_of(batch))
        if not self.free:
            zeros = [0.0] * len(step.stages)
            self.free, self.busy, self.comm = zeros, zeros[:], zeros[:]
        if not self.flights:
            self.since = now
        ready = max(now, self._known(batch)) if len(self.free) > 1 and self.flights else now
        emitted = _through(step, self.free, ready)
        settled = emitted + (step.send if len(self.free) > 1 else 0.0)
        if self.flights:
            settled = max(settled, self.flights[-1].settled)
        self.flights.append(_Flight(batch, emitted, settled))
        self._count(step)
        return batch

    def _known(self, batch: StepBatch) -> float:
        """When the tokens that the batch goes on from are back at the first stage."""
        ids = set(batch.request_ids)
        waits = [f.settled for f in self.flights if not ids.isdisjoint(f.batch.sampled_ids)]
        return max(waits, default=0.0)

    def _count(self, step: StepCost) -> None:
        self.busy[0] += step.stages[0]
        self.comm[0] += step.comm[0]
        for stage in range(1, len(self.free)):
            self.busy[stage] += step.stages[stage]
            self.comm[stage] += step.comm[stage]
        self.steps += 1
        self.send += step.send
        used = self.pages.num_pages - self.pages.num_free
        if used > self.peak:
            self.peak = used
        waiting = self.scheduler.num_waiting
        if waiting > self.waiting:
            self.waiting = waiting

    def use(self) -> ReplicaUse:
        num_requests = len(self.who)
        return ReplicaUse(
            num_requests,
            self.steps,
            self.active,
            tuple(self.busy),
            tuple(self.comm),
            self.send,
            self.peak,
            self.waiting,
        )


class _Replayer:
    """The clock: arrivals in order, and the oldest step of each replica as it is settled."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        serving: Serving,
        cost: Cost,
        concurrency: int,
        observe: Observer | None,
    ) -> None:
        self.arrivals, self.serving, self.observe = arrivals, serving, observe
        self.replicas = [_Replica(serving, cost) for _ in range(serving.replicas)]
        self.outstanding = [0] * serving.replicas  # tokens that are asked for and not there yet
        self.options: dict[int, SamplingOptions] = {}
        count = len(arrivals)
        order = sorted(range(count), key=lambda i: arrivals[i].at)
        self.closed = concurrency > 0
        self.coming = deque(order[:concurrency] if self.closed else order)
        self.held = deque(order[concurrency:] if self.closed else ())
        self.arrived = [0.0 if self.closed else a.at for a in arrivals]
        self.where, self.preempted = [0] * count, [0] * count
        self.started, self.first, self.ended = [-1.0] * count, [-1.0] * count, [-1.0] * count
        self.events: list[tuple[float, int]] = []  # (settled, replica): its oldest step

    def run(self) -> Replay:
        begin = self.arrived[self.coming[0]]
        while self.coming or self.events:
            now = self.events[0][0] if self.events else float("inf")
            if self.coming and self.arrived[self.coming[0]] <= now:
                self._arrive(self.arrived[self.coming[0]])
            else:
                self._settle(now, heapq.heappop(self.events)[1])
        span = max(self.ended) - begin
        assert min(self.ended) >= 0.0, "a request did not end"
        return Replay(self.serving, self._times(), tuple(r.use() for r in self.replicas), span)

    def _arrive(self, now: float) -> None:
        """Give out all requests of this moment; replicas without a step begin one."""
        idle: dict[int, None] = {}
        while self.coming and self.arrived[self.coming[0]] <= now:
            at = self._route(self.coming.popleft())
            if not self.replicas[at].flights:
                idle[at] = None
        for at in idle:
            self._fill(now, at)

    def _route(self, index: int) -> int:
        """To the replica with the fewest outstanding tokens; the first of equal ones."""
        at = min(range(len(self.outstanding)), key=self.outstanding.__getitem__)
        arrival = self.arrivals[index]
        count = arrival.output_tokens
        options = self.options.setdefault(count, SamplingOptions(max_tokens=count, ignore_eos=True))
        self.outstanding[at] += arrival.prompt_tokens + count
        self.where[index] = at
        self.replicas[at].add(index, arrival, options)
        return at

    def _fill(self, now: float, at: int) -> None:
        """Schedule as many steps as may be in flight; the engine then waits for the oldest."""
        replica = self.replicas[at]
        while (batch := replica.next_step(now)) is not None:
            if replica.fresh:
                for request_id in replica.fresh.intersection(batch.request_ids):
                    self.started[replica.who[request_id]] = now
                    replica.fresh.discard(request_id)
            if self.observe is not None:
                self.observe(at, batch)
        if replica.flights:
            heapq.heappush(self.events, (replica.flights[0].settled, at))

    def _settle(self, now: float, at: int) -> None:
        """The oldest step of a replica has ended: tokens are there, requests may end."""
        replica = self.replicas[at]
        flight = replica.flights[0]
        ids = flight.batch.sampled_ids
        self.outstanding[at] -= len(ids)
        if replica.silent:
            for request_id in replica.silent.intersection(ids):
                index = replica.who[request_id]
                self.first[index] = flight.emitted
                self.outstanding[at] -= self.arrivals[index].prompt_tokens
                replica.silent.discard(request_id)
        for request in replica.scheduler.settle(flight.batch, [0] * len(ids)):
            index = replica.who[request.id]
            self.ended[index], self.preempted[index] = flight.emitted, request.num_preemptions
            if self.held:
                self._release(now)
        replica.flights.popleft()
        if not replica.flights:
            replica.active += now - replica.since
        self._fill(now, at)

    def _release(self, now: float) -> None:
        """The next request of a closed loop comes now."""
        index = self.held.popleft()
        self.arrived[index] = now
        at = self._route(index)
        if not self.replicas[at].flights:
            self._fill(now, at)

    def _times(self) -> tuple[RequestTimes, ...]:
        order = sorted(range(len(self.arrivals)), key=lambda i: (self.arrived[i], i))
        return tuple(
            RequestTimes(
                self.where[i],
                self.arrivals[i].prompt_tokens,
                self.arrivals[i].output_tokens,
                self.preempted[i],
                self.arrived[i],
                self.started[i],
                self.first[i],
                self.ended[i],
            )
            for i in order
        )
