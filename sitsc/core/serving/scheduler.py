"""Continuous batching with chunked prefill over a pool of KV pages. Plain Python, no clock.

Requests run in order of arrival. When pages run out the youngest running request gives its pages
back and is computed again later, so the oldest always advances and every request ends with
exactly one reason. Steps are settled in the order in which they were scheduled; a step may be
scheduled before the one before it is settled: the tokens in between are then `UNKNOWN`.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields

from sitsc.core.errors import OptionError, OutOfPagesError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.core.serving.kv_blocks import PagePool
from sitsc.core.serving.request import FinishReason, Request, RequestState, check_length

MOST_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one step and one request may hold; raises `OptionError` when they contradict."""

    max_batch: int  # sequences in a step
    max_step_tokens: int  # tokens in a step, all sequences together
    prefill_chunk_tokens: int  # tokens of one sequence in a step
    max_context: int  # tokens of one request, prompt and answer
    micro_batches: int = 1  # parts of the running sequences that take turns in the stages
    tokens_ahead: bool = False  # micro-batches go on from tokens that are still in flight
    chunks: tuple[tuple[int, int], ...] = ()  # (prompts up to so many tokens, their chunk), rising

    def chunk_of(self, prompt_tokens: int) -> int:
        """Most tokens of a prompt of that length in one step."""
        fits = next((chunk for longest, chunk in self.chunks if prompt_tokens <= longest), 0)
        return min(fits or self.prefill_chunk_tokens, self.prefill_chunk_tokens)

    def pieces_of(self, prompt_tokens: int) -> list[int]:
        """The tokens of a lone prompt in each of its steps."""
        return pieces(prompt_tokens, self.chunk_of(prompt_tokens))

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name not in ("chunks", "tokens_ahead") and value < 1:
                raise OptionError(f"{spec.name}={value} is not allowed", hint="it must be ≥ 1")
        if self.max_step_tokens < self.max_batch:
            raise OptionError(
                f"max_step_tokens={self.max_step_tokens} is below max_batch={self.max_batch}",
                hint="every running sequence needs one token in a step",
            )


def pieces(tokens: int, chunk: int) -> list[int]:
    """A prompt in chunks; whole for a chunk of 0."""
    size = chunk or tokens
    return [min(size, tokens - before) for before in range(0, tokens, size)]


class Scheduler:
    """Chooses the tokens of each step; owns the requests until they finish."""

    def __init__(
        self, limits: SchedulerLimits, pages: PagePool, eos_ids: Collection[int] = ()
    ) -> None:
        self.limits, self.pages, self.eos_ids = limits, pages, frozenset(eos_ids)
        self.context_tokens = min(limits.max_context, pages.capacity_tokens)
        self._waiting: deque[Request] = deque()  # by arrival
        self._running: list[Request] = []  # by arrival, all older than any waiting one
        self._requests: dict[int, Request] = {}  # waiting and running
        self._in_flight: deque[StepBatch] = deque()
        self._num_arrivals = 0

    @property
    def most_in_flight(self) -> int:
        """Steps that may be scheduled before the first is settled."""
        return max(MOST_IN_FLIGHT, self.limits.micro_batches + self.limits.tokens_ahead)

    @property
    def num_waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in the batch."""
        return len(self._running)

    def get(self, request_id: int) -> Request | None:
        """The request while it waits or runs."""
        return self._requests.get(request_id)

    def add(self, prompt_ids: Sequence[int], options: SamplingOptions) -> Request:
        """Queue a prompt. Raises `RequestError` if it is empty, `CapacityError` if too long."""
        check_length(len(prompt_ids), self.context_tokens)
        room = self.context_tokens - len(prompt_ids)
        arrival = self._num_arrivals
        self._num_arrivals += 1
        limit = min(options.max_tokens, room)
        request = Request(arrival, prompt_ids, options, arrival, limit)
        self._requests[request.id] = request
        self._waiting.append(request)
        return request

    def schedule(self, *, alone: bool = False) -> StepBatch | None:
        """The next step, or None when there is nothing to compute. `settle` or `drop` it later.

        With a step in flight, requests go on from the tokens that it will sample; a request whose
        last token is in flight waits for it. `alone`: it will be settled before the next is
        scheduled, so that micro-batches have no use. Raises nothing.
        """
        assert len(self._in_flight) < self.most_in_flight, "too many steps are not settled"
        if self._waiting:
            self._admit()
        batch = self._fill(alone and not self._in_flight)
        if batch is not None:
            self._in_flight.append(batch)
        return batch

    def settle(
        self, batch: StepBatch, sampled: Sequence[int], stopped: Collection[int] = ()
    ) -> list[Request]:
        """Take the oldest step's results; the requests that finished, their pages free again.

        `sampled` has one token for each True of `batch.sample`, in order; `stopped` names requests
        that end with "stop" at this token whatever it is. Requests ended meanwhile are skipped.
        """
        assert len(sampled) == sum(batch.sample), "one token a sampled row"
        self._land(batch)
        finished: list[Request] = []
        for request_id, token in zip(batch.sampled_ids, sampled, strict=True):
            request = self._requests.get(request_id)
            if request is not None:
                request.num_pending -= 1
                reason = self._take(request, token, request_id in stopped)
                if reason is not None:
                    finished.append(self._finish(request, reason))
        return finished

    def drop(self, batch: StepBatch) -> list[Request]:
        """End every request of a step that failed, with "error"; returns them."""
        self._land(batch)
        return self.end(batch.request_ids, "error")

    def _land(self, batch: StepBatch) -> None:
        assert self._in_flight and batch is self._in_flight[0], "this is not the oldest step"
        self._in_flight.popleft()

    def abort(self, request_id: int) -> Request | None:
        """End a request now, at any time; None if it has ended already."""
        return next(iter(self.end((request_id,), "abort")), None)

    def end(self, request_ids: Iterable[int], reason: FinishReason) -> list[Request]:
        """End those of the requests that still wait or run; returns them."""
        found = [self._requests.get(request_id) for request_id in request_ids]
        return [self._finish(request, reason) for request in found if request is not None]

    def check(self) -> None:
        """Assert what must hold between two calls; raises on a broken page count as well."""
        self.pages.check()
        order = [request.arrival for request in [*self._running, *self._waiting]]
        assert order == sorted(set(order)), "requests are out of order"
        assert len(order) == len(self._requests), "a request is lost"
        assert len(self._running) <= self.limits.max_batch, "the batch is too large"
        held = 0
        for request in self._running:
            assert request.state is RequestState.RUNNING
            held += len(self.pages.table(request.id))
            assert self.pages.num_tokens(request.id) == request.num_computed
            assert request.num_computed < request.num_tokens <= self.context_tokens
            assert 0 <= request.num_pending <= len(self._in_flight)
        assert held + self.pages.num_free == self.pages.num_pages, "pages are lost"
        for request in self._waiting:
            assert request.state is RequestState.WAITING and request.num_computed == 0

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while all running ones keep room to grow.

        Room: the pages of what is not computed yet, and one more for every running request, so
        that a request is not started only to be preempted by the next token of another.
        """
        pages, running = self.pages, self._running
        promised = -1
        while self._waiting and len(running) < self.limits.max_batch:
            if promised < 0:
                promised = sum(self._missing_pages(request) + 1 for request in running)
            request = self._waiting[0]
            if request.num_pending:  # preempted with a step in flight: its token comes first
                return
            needed = pages.pages_for(len(request.token_ids))
            if running and promised + needed > pages.num_free:
                return
            self._waiting.popleft()
            pages.allocate(request.id)
            request.state = RequestState.RUNNING
            running.append(request)
            promised += needed + 1

    def _missing_pages(self, request: Request) -> int:
        owned = len(self.pages.table(request.id))
        return self.pages.pages_for(request.num_tokens) - owned

    def _fill(self, alone: bool) -> StepBatch | None:
        """Give every running request its tokens, oldest first; decoding ones never wait."""
        limits = self.limits
        running = self._ready(alone)
        decoding = sum(r.num_tokens - r.num_computed == 1 for r in running)
        prefill_budget = limits.max_step_tokens - decoding
        ids: list[int] = []
        tokens: list[int] = []
        starts, contexts, tables, sample = [0], [], [], []
        decode = True
        for request in running:
            if request.state is not RequestState.RUNNING:
                break  # preempted for an older one, and so are all after it
            context = request.num_computed
            remaining = request.num_tokens - context
            count = 1
            if remaining > 1:
                count = min(remaining, limits.chunk_of(request.num_tokens), prefill_budget)
                if count == 0:
                    continue
                prefill_budget -= count
            table = self._grow(request, count)
            if table is None:
                break
            decode = decode and count == remaining == 1
            ids.append(request.id)
            known = request.token_ids[context : context + count]
            tokens += known + [UNKNOWN] * (count - len(known))
            starts.append(len(tokens))
            contexts.append(context)
            tables.append(table)
            sample.append(count == remaining)
            request.num_computed += count
            request.num_pending += count == remaining
        if not ids:
            return None
        regime = "decode" if decode else "prefill"
        return StepBatch(regime, tuple(ids), tokens, starts, contexts, tables, sample)

    def _ready(self, alone: bool) -> list[Request]:
        """Running requests that a step may advance.

        With micro-batches a step takes its share of them, so that stages have about as much to do
        in every step. Those whose token is in flight wait for it, or, where tokens may be ahead,
        until the other micro-batches have had their turn.
        """
        running = [request for request in self._running if not request.is_ending]
        if self.limits.micro_batches == 1 or alone:
            return running
        if not self.limits.tokens_ahead:
            return self._share([request for request in running if not request.num_pending])
        late = list(self._in_flight)[1 - self.limits.micro_batches :]
        others = {request_id for batch in late for request_id in batch.sampled_ids}
        ready = [r for r in running if r.id not in others and r.num_pending < MOST_IN_FLIGHT]
        return self._share(ready or self._oldest_in_flight(running))

    def _share(self, ready: list[Request]) -> list[Request]:
        """The oldest of those that may advance, a micro-batch of them.

        Prompts of which a part is computed come on top: none of their steps samples, so that they
        would take the place of a sequence in every step, and the youngest would wait for the whole
        prompt.
        """
        part = [r for r in self._running if r.num_computed and r.num_tokens > r.num_computed + 1]
        begun = {request.id for request in part}
        others = sum(not r.is_ending for r in self._running) - len(begun)
        left, found = -(-others // self.limits.micro_batches), []
        for request in ready:
            if request.id in begun or left:
                left -= request.id not in begun
                found.append(request)
        return found

    def _oldest_in_flight(self, running: list[Request]) -> list[Request]:
        """Those of the oldest step that may go on from it when nothing else can be done."""
        for batch in self._in_flight:
            ids = set(batch.sampled_ids)
            found = [r for r in running if r.id in ids and r.num_pending < MOST_IN_FLIGHT]
            if found:
                return found
        return []

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Its table with room for more tokens; None if it was the youngest and had to give way."""
        while True:
            try:
                return self.pages.append(request.id, num_tokens)
            except OutOfPagesError:
                victim = self._running.pop()
                self._preempt(victim)
                if victim is request:
                    return None

    def _preempt(self, request: Request) -> None:
        self.pages.free(request.id)
        request.state, request.num_computed = RequestState.WAITING, 0
        request.num_preemptions += 1
        self._waiting.appendleft(request)

    def _take(self, request: Request, token: int, stopped: bool) -> FinishReason | None:
        reason = request.ending_with(token, self.eos_ids)
        request.token_ids.append(token)
        return "stop" if stopped else reason

    def _finish(self, request: Request, reason: FinishReason) -> Request:
        del self._requests[request.id]
        if request.state is RequestState.RUNNING:
            self._running.remove(request)
            self.pages.free(request.id)
        else:
            self._waiting.remove(request)
        request.finish(reason)
        return request
