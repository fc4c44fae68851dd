"""The scheduler under random arrivals, aborts, failures and tiny page pools."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sitsc.core.errors import CapacityError, OptionError, RequestError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.core.serving.kv_blocks import PagePool
from sitsc.core.serving.request import Request, RequestState
from sitsc.core.serving.scheduler import Scheduler, SchedulerLimits

EOS = 99
OPTIONS = st.builds(
    SamplingOptions,
    max_tokens=st.integers(2, 30),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 2),
)


class KvModel:
    """An independent account: the token written into each slot of each page."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.slots: dict[tuple[int, int], tuple[int, int, int]] = {}  # (owner, position, token)

    def write(self, batch: StepBatch) -> dict[int, list[int]]:
        """Store the step's tokens; then what each sequence reads back through its table."""
        seen: dict[int, list[int]] = {}
        pages: list[int] = []
        for row, owner in enumerate(batch.request_ids):
            start, end = batch.query_start[row : row + 2]
            table, context = batch.block_tables[row], batch.context_lens[row]
            pages += table
            for offset, token in enumerate(batch.token_ids[start:end]):
                page, slot = divmod(context + offset, self.page_tokens)
                self.slots[table[page], slot] = (owner, context + offset, token)
            seen[owner] = []
            for position in range(context + end - start):
                page, slot = divmod(position, self.page_tokens)
                stored_owner, stored_position, token = self.slots[table[page], slot]
                assert (stored_owner, stored_position) == (owner, position)
                seen[owner].append(token)
        assert len(pages) == len(set(pages)), "two sequences share a page"
        return seen


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        max_batch=st.integers(1, 5),
        extra=st.integers(0, 8),
        chunk=st.integers(1, 9),
        context=st.integers(2, 40),
        num_pages=st.integers(1, 12),
        page_tokens=st.integers(1, 5),
        parts=st.integers(1, 3),
        tokens_ahead=st.booleans(),
    )
    def begin(
        self, max_batch, extra, chunk, context, num_pages, page_tokens, parts, tokens_ahead
    ) -> None:
        more = {"micro_batches": parts, "tokens_ahead": tokens_ahead and parts > 1}
        self.limits = SchedulerLimits(max_batch, max_batch + extra, chunk, context, **more)
        self.scheduler = Scheduler(self.limits, PagePool(num_pages, page_tokens), {EOS})
        self.kv = KvModel(page_tokens)
        self.context = min(context, num_pages * page_tokens)
        self.requests: list[Request] = []
        self.ended: dict[int, str] = {}
        self.flying: list[tuple[StepBatch, list[int]]] = []  # with what the step samples

    def record(self, finished: list[Request]) -> None:
        for request in finished:
            assert request.id not in self.ended
            assert request.finish_reason is not None and request.state is RequestState.FINISHED
            self.ended[request.id] = request.finish_reason

    @rule(length=st.integers(0, 45), options=OPTIONS)
    def add(self, length: int, options: SamplingOptions) -> None:
        prompt = [len(self.requests) * 100 + i for i in range(length)]
        if length == 0:
            with pytest.raises(RequestError):
                self.scheduler.add(prompt, options)
        elif length >= self.context:
            with pytest.raises(CapacityError, match=str(length)):
                self.scheduler.add(prompt, options)
        else:
            self.requests.append(self.scheduler.add(prompt, options))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        ended = self.scheduler.abort(request.id)
        assert (ended is None) == (request.id in self.ended)
        self.record([ended] if ended else [])

    @rule(data=st.data(), ahead=st.booleans(), fate=st.sampled_from(["settle"] * 9 + ["drop"]))
    def step(self, data: st.DataObject, ahead: bool, fate: str) -> None:
        self.advance(lambda: data.draw(st.sampled_from([7, 8, EOS])), ahead, fate)

    @precondition(lambda self: self.flying)
    @rule()
    def land(self) -> None:
        self.settle()

    def advance(self, draw, ahead: bool = False, fate: str = "settle") -> None:
        """Schedule a step; unless it runs ahead, settle all that fly."""
        waits = [r for r in self.requests if r.id not in self.ended and not r.is_ending]
        batch = self.scheduler.schedule()
        if batch is None:
            assert self.flying or not waits
        else:
            self.scheduler.check()
            if not self.flying:
                assert batch.request_ids[0] == waits[0].id, "the oldest advances"
            self.inspect(batch)
            self.flying.append((batch, [draw() for _ in batch.sampled_ids]))
        while self.flying and (not ahead or len(self.flying) == self.scheduler.most_in_flight):
            self.settle(fate)

    def settle(self, fate: str = "settle") -> None:
        batch, sampled = self.flying.pop(0)
        if fate == "drop":
            self.record(self.scheduler.drop(batch))
            return
        before = {i for i in batch.sampled_ids if i in self.ended}
        self.record(self.scheduler.settle(batch, sampled))
        for request_id, token in zip(batch.sampled_ids, sampled, strict=True):
            if request_id not in before:
                assert self.requests[request_id].token_ids[-1] == token

    def virtual(self, request: Request) -> list[int]:
        """All tokens of a request, those included that steps in flight sample."""
        tokens = list(request.token_ids)
        for batch, sampled in self.flying:
            tokens += [
                t for i, t in zip(batch.sampled_ids, sampled, strict=True) if i == request.id
            ]
        return tokens

    def inspect(self, batch: StepBatch) -> None:
        """The batch obeys its limits and holds the right tokens in the right slots."""
        counts = [b - a for a, b in zip(batch.query_start, batch.query_start[1:], strict=False)]
        assert sum(counts) == batch.num_tokens == batch.query_start[-1]
        assert batch.num_tokens <= self.limits.max_step_tokens
        assert 1 <= batch.num_seqs <= self.limits.max_batch
        assert all(1 <= count <= self.limits.prefill_chunk_tokens for count in counts)
        one_each = all(count == 1 for count in counts) and all(batch.sample)
        assert (batch.regime == "decode") == one_each
        last: dict[int, int] = {}
        for step, sampled in self.flying:
            last |= dict(zip(step.sampled_ids, sampled, strict=True))
        parts = self.limits.micro_batches
        for row, owner in enumerate(batch.request_ids):
            end = batch.query_start[row + 1]
            for at in range(batch.query_start[row], end):
                if batch.token_ids[at] == UNKNOWN:
                    assert at == end - 1, "only a last token can be unknown"
                    assert parts == 1 or self.limits.tokens_ahead, "it is still in a stage"
                    batch.token_ids[at] = last[owner]
        for row, (owner, tokens) in enumerate(self.kv.write(batch).items()):
            whole = self.virtual(self.requests[owner])
            assert tokens == whole[: len(tokens)]
            assert batch.sample[row] == (len(tokens) == len(whole))
        running = [r for r in self.requests if r.state is RequestState.RUNNING]
        waiting = {r.id for r in running if r.num_tokens == r.num_computed + 1}
        left = waiting - set(batch.request_ids)
        assert parts > 1 or all(self.requests[i].is_ending for i in left)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        """Everything left runs to its end, and every end is right."""
        if not hasattr(self, "scheduler"):
            return
        for index in range(20_000):
            if len(self.ended) == len(self.requests) and not self.flying:
                break
            self.advance(lambda: 7, ahead=index % 3 > 0)
        assert self.scheduler.schedule() is None
        pool = self.scheduler.pages
        assert pool.num_free == pool.num_pages
        for request in self.requests:
            self.check_ending(request, self.ended[request.id])

    def check_ending(self, request: Request, reason: str) -> None:
        room = self.context - len(request.prompt_ids)
        limit = min(request.options.max_tokens, room)
        generated = request.generated_ids
        assert len(generated) <= limit
        if reason == "length":
            assert len(generated) == limit
        if reason == "stop":
            assert generated[-1] == EOS and not request.options.ignore_eos
            assert len(generated) > request.options.min_tokens
        early = generated[request.options.min_tokens : -1]
        assert request.options.ignore_eos or EOS not in early


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def scheduler(max_batch=4, step=16, chunk=8, context=64, pages=16, page_tokens=4) -> Scheduler:
    limits = SchedulerLimits(max_batch, step, chunk, context)
    return Scheduler(limits, PagePool(pages, page_tokens), {EOS})


def run(machine: Scheduler, token: int = 7) -> StepBatch:
    batch = machine.schedule()
    assert batch is not None
    machine.settle(batch, [token] * len(batch.sampled_ids))
    machine.check()
    return batch


def test_micro_batches_take_turns_without_waiting_for_their_tokens() -> None:
    limits = SchedulerLimits(8, 64, 8, 64, micro_batches=2, tokens_ahead=True)
    machine = Scheduler(limits, PagePool(64, 4), {EOS})
    ids = [machine.add([1, 2], SamplingOptions(max_tokens=20)).id for _ in range(6)]
    flying = []
    for _ in range(3):
        flying.append(machine.schedule())
    assert [batch.request_ids for batch in flying] == [
        tuple(ids[:3]),
        tuple(ids[3:]),
        tuple(ids[:3]),
    ]
    assert flying[2].token_ids == [UNKNOWN] * 3
    for turn in range(8):
        batch = flying.pop(0)
        machine.settle(batch, [7] * 3)
        flying.append(machine.schedule())
        machine.check()
        assert flying[-1].request_ids == (tuple(ids[:3]) if turn % 2 else tuple(ids[3:]))
        assert flying[-1].token_ids == [UNKNOWN] * 3


def test_a_lone_request_goes_on_from_a_token_in_flight() -> None:
    limits = SchedulerLimits(8, 64, 8, 64, micro_batches=3, tokens_ahead=True)
    machine = Scheduler(limits, PagePool(64, 4), {EOS})
    machine.add([1, 2, 3], SamplingOptions(max_tokens=3))
    first, second = machine.schedule(), machine.schedule()
    assert first is not None and second is not None and second.token_ids == [UNKNOWN]
    assert machine.schedule() is None, "two tokens in flight are enough"
    machine.settle(first, [7])
    third = machine.schedule()
    assert third is not None and third.context_lens == [4]
    machine.settle(second, [7])
    assert machine.schedule() is None
    (ended,) = machine.settle(third, [7])
    assert ended.generated_ids == [7, 7, 7]


def longest_pauses(machine: Scheduler, ahead: int, steps: int) -> dict[int, int]:
    """Of each request the most steps from one that it is in to the next."""
    flying: list[StepBatch] = []
    last: dict[int, int] = {}
    pauses: dict[int, int] = {}
    for step in range(steps):
        batch = machine.schedule(alone=not ahead)
        if batch is not None:
            flying.append(batch)
            for owner in batch.request_ids:
                pauses[owner] = max(pauses.get(owner, 0), step - last.get(owner, 0))
                last[owner] = step
        if flying and (batch is None or len(flying) > ahead):
            done = flying.pop(0)
            machine.settle(done, [7] * len(done.sampled_ids))
            machine.check()
    return {owner: max(pauses[owner], steps - 1 - step) for owner, step in last.items()}


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("tokens_ahead", [False, True])
def test_nobody_stands_still_while_a_long_prompt_is_computed(stages, tokens_ahead) -> None:
    for lengths in ([400, 3, 3, 3], [3, 400, 3, 3, 3], [3, 3, 3, 400]):
        limits = SchedulerLimits(8, 16, 8, 500, micro_batches=stages, tokens_ahead=tokens_ahead)
        machine = Scheduler(limits, PagePool(4000, 4))
        for length in lengths:
            machine.add([1] * length, SamplingOptions(max_tokens=100))
        pauses = longest_pauses(machine, stages if tokens_ahead else stages - 1, 40)
        short = [pauses[i] for i, length in enumerate(lengths) if length == 3]
        assert max(short) <= stages + 1


@pytest.mark.parametrize("tokens_ahead", [False, True])
def test_a_step_that_is_waited_for_takes_all(tokens_ahead) -> None:
    limits = SchedulerLimits(8, 64, 8, 500, micro_batches=3, tokens_ahead=tokens_ahead)
    machine = Scheduler(limits, PagePool(4000, 4))
    for _ in range(7):
        machine.add([1, 2], SamplingOptions(max_tokens=100))
    assert set(longest_pauses(machine, 0, 30).values()) == {1}


def test_chunked_prefill_then_decode() -> None:
    machine = scheduler()
    machine.add(list(range(20)), SamplingOptions())
    batches = [run(machine) for _ in range(4)]
    assert [b.num_tokens for b in batches] == [8, 8, 4, 1]
    assert [b.context_lens for b in batches] == [[0], [8], [16], [20]]
    assert [b.sample for b in batches] == [[False], [False], [True], [True]]
    assert [b.regime for b in batches] == ["prefill"] * 3 + ["decode"]
    assert batches[3].token_ids == [7]


def test_prompts_are_cut_as_their_length_says() -> None:
    limits = SchedulerLimits(2, 34, 32, 100, chunks=((10, 0), (30, 8), (100, 64)))
    assert [limits.chunk_of(n) for n in (1, 10, 11, 30, 31, 100)] == [32, 32, 8, 8, 32, 32]
    scheduler = Scheduler(limits, PagePool(40, 4), [EOS])
    scheduler.add(list(range(10)), SamplingOptions(max_tokens=1))
    scheduler.add(list(range(20)), SamplingOptions(max_tokens=1))
    step = scheduler.schedule()
    assert step is not None
    assert step.query_start == [0, 10, 18]


def test_decoding_goes_on_beside_a_long_prefill() -> None:
    machine = scheduler(max_batch=2, step=4, chunk=8)
    machine.add([1], SamplingOptions())
    run(machine)
    machine.add(list(range(30)), SamplingOptions())
    for _ in range(9):
        batch = run(machine)
        assert batch.request_ids[0] == 0 and batch.sample[0]
        assert batch.num_tokens == 4


def test_a_step_ahead_of_its_tokens() -> None:
    machine = scheduler()
    request = machine.add([1, 2, 3], SamplingOptions(max_tokens=3))
    first, second = machine.schedule(), machine.schedule()
    assert first is not None and second is not None
    assert second.token_ids == [UNKNOWN] and second.context_lens == [3]
    machine.settle(first, [7])
    third = machine.schedule()
    assert third is not None and third.token_ids == [UNKNOWN]
    machine.settle(second, [8])
    assert machine.schedule() is None, "the third token is the last"
    assert machine.settle(third, [9]) == [request]
    assert request.generated_ids == [7, 8, 9] and request.finish_reason == "length"


def test_what_was_computed_past_the_end_is_thrown_away() -> None:
    machine = scheduler()
    request = machine.add([1], SamplingOptions(max_tokens=9))
    first, second = machine.schedule(), machine.schedule()
    assert first is not None and second is not None
    assert machine.settle(first, [EOS]) == [request]
    assert machine.settle(second, [7]) == []
    assert request.generated_ids == [EOS] and machine.pages.num_free == machine.pages.num_pages


def test_youngest_gives_way_and_comes_back() -> None:
    machine = scheduler(pages=6, page_tokens=2)
    requests = [machine.add([i] * 3, SamplingOptions(max_tokens=7)) for i in (1, 2)]
    finished: list[int] = []
    while (batch := machine.schedule()) is not None:
        finished += [r.id for r in machine.settle(batch, [7] * len(batch.sampled_ids))]
        machine.check()
    assert finished == [0, 1]
    assert [r.num_preemptions for r in requests] == [0, 1]
    assert [r.finish_reason for r in requests] == ["length", "length"]
    assert all(r.generated_ids == [7] * 7 for r in requests)


def test_stop_string_wins_over_length() -> None:
    machine = scheduler()
    request = machine.add([1], SamplingOptions(max_tokens=1))
    batch = machine.schedule()
    assert batch is not None
    machine.settle(batch, [7], stopped=[request.id])
    assert request.finish_reason == "stop"


def test_messages_say_the_numbers() -> None:
    machine = scheduler(context=64, pages=4, page_tokens=4)  # the pool is the smaller limit
    with pytest.raises(CapacityError, match=r"16 tokens.*holds 16.*at most 15"):
        machine.add([1] * 16, SamplingOptions())
    with pytest.raises(RequestError, match="empty"):
        machine.add([], SamplingOptions())
    with pytest.raises(OptionError, match="max_step_tokens=3 is below max_batch=4"):
        SchedulerLimits(4, 3, 1, 8)
    with pytest.raises(OptionError, match="max_context=0"):
        SchedulerLimits(1, 1, 1, 0)
