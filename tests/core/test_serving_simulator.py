"""The replay of a workload: every request ends once, time runs forwards, nothing is overfull."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.errors import CapacityError, OptionError
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.latency import percentiles, summarise
from sitsc.core.serving.scheduler import SchedulerLimits
from sitsc.core.serving.simulator import (
    Arrival,
    BatchSizes,
    Piece,
    Replay,
    Serving,
    StepCost,
    replay_prompts,
    simulate,
    sizes_of,
)

LIMITS = SchedulerLimits(max_batch=4, max_step_tokens=16, prefill_chunk_tokens=8, max_context=60)
SERVING = Serving(LIMITS, num_pages=100, page_tokens=4)


def cost(sizes: BatchSizes) -> StepCost:
    """Two stages, the second slower; a millisecond a token or so."""
    seconds = 1e-3 * (1 + sizes.tokens) + 1e-5 * sizes.decode_context
    return StepCost((seconds, 1.5 * seconds), (seconds / 4, 0.0), 1e-4)


def single(sizes: BatchSizes) -> StepCost:
    """One stage."""
    first = cost(sizes)
    return StepCost(first.stages[:1], first.comm[:1])


ARRIVALS = st.lists(
    st.builds(Arrival, st.floats(0, 1), st.integers(1, 30), st.integers(1, 25)),
    min_size=1,
    max_size=25,
)


def check(arrivals: list[Arrival], replay: Replay, batches: dict[int, list[StepBatch]]) -> None:
    """What holds for every replay."""
    wanted = sorted((a.prompt_tokens, a.output_tokens) for a in arrivals)
    assert sorted((r.prompt_tokens, r.output_tokens) for r in replay.requests) == wanted
    for r in replay.requests:
        assert 0 <= r.arrived <= r.started < r.first <= r.ended
        assert (r.first == r.ended) == (r.output_tokens == 1)
    sampled = sum(sum(b.sample) for made in batches.values() for b in made)
    assert sampled >= sum(a.output_tokens for a in arrivals)
    if not sum(r.preemptions for r in replay.requests) and replay.serving.in_flight == 1:
        assert sampled == sum(a.output_tokens for a in arrivals), "each token is computed once"
    for use in replay.replicas:
        assert max((*use.busy, 0.0)) <= use.active * (1 + 1e-9)
        assert use.active <= replay.span + 1.1e-4  # the last token goes back to the first stage
        assert use.peak_pages <= replay.serving.num_pages
    summary = summarise(replay)
    for stage in summary.stages:
        assert 0 <= stage.bubble <= 1 and 0 <= stage.comm <= stage.busy <= stage.busiest <= 1
    for values in (summary.queue_ms, summary.ttft_ms, summary.tpot_ms, summary.e2e_ms):
        assert values.p50 <= values.p90 <= values.p99 <= values.max


@settings(max_examples=60, deadline=None)
@given(
    ARRIVALS,
    st.integers(1, 3),
    st.integers(14, 40),
    st.integers(0, 1),
    st.integers(0, 5),
    st.booleans(),
)
def test_every_request_ends_once(arrivals, replicas, pages, ahead, concurrency, staged) -> None:
    serving = Serving(LIMITS, pages, 4, replicas, ahead)
    batches: dict[int, list[StepBatch]] = {}

    def observe(replica: int, batch: StepBatch) -> None:
        batches.setdefault(replica, []).append(batch)

    step = cost if staged else single
    replay = simulate(arrivals, serving, step, concurrency=concurrency, observe=observe)
    check(arrivals, replay, batches)
    assert simulate(arrivals, serving, step, concurrency=concurrency) == replay


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.booleans(), st.integers(0, 1))
def test_a_lone_request_takes_its_prompt_and_its_tokens(prompt, output, staged, ahead) -> None:
    """First the chunks, then one step a token; nothing else is in between."""
    step = cost if staged else single

    def through(sizes: BatchSizes) -> float:
        made = step(sizes)
        return sum(made.stages) + (len(made.stages) - 1) * made.send

    back = 1e-4 if staged else 0.0
    serving = replace(SERVING, num_ahead=0 if staged else ahead)
    (request,) = simulate([Arrival(0.5, prompt, output)], serving, step).requests
    ttft = 0.0
    for before in range(0, prompt, 8):
        tokens = min(8, prompt - before)
        last = before + tokens == prompt
        alone = BatchSizes(1, before) if last and tokens == 1 else None
        ttft += through(alone or BatchSizes(0, 0, (Piece(tokens, before, last),)))
        ttft += 0.0 if last else back
    assert request.ttft == pytest.approx(ttft, rel=1e-9)
    decode = sum(back + through(BatchSizes(1, prompt + i)) for i in range(output - 1))
    assert request.e2e == pytest.approx(ttft + decode, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(ARRIVALS, st.integers(1, 2))
def test_a_second_replica_halves_what_one_does(arrivals, replicas) -> None:
    """Replicas share the requests and each serves at least one when there are enough."""
    replay = simulate(arrivals, replace(SERVING, replicas=replicas), cost)
    assert sum(use.requests for use in replay.replicas) == len(arrivals)
    once = [replace(a, at=0.0) for a in arrivals]
    used = simulate(once, replace(SERVING, replicas=replicas), cost).replicas
    assert sum(use.requests > 0 for use in used) == min(replicas, len(arrivals))


def test_requests_go_where_least_is_outstanding() -> None:
    arrivals = [Arrival(0.0, 30, 20), Arrival(0.0, 4, 2), Arrival(0.0, 4, 2), Arrival(9.0, 1, 1)]
    replay = simulate(arrivals, replace(SERVING, replicas=2), cost)
    assert [r.replica for r in replay.requests] == [0, 1, 1, 0]


def test_a_closed_loop_keeps_so_many_at_once() -> None:
    arrivals = [Arrival(0.0, 5, 3 + i % 4) for i in range(20)]
    requests = simulate(arrivals, SERVING, cost, concurrency=3).requests
    for r in requests:
        assert sum(o.arrived <= r.arrived < o.ended - 1e-9 for o in requests) <= 3
    ends = sorted(r.ended for r in requests)
    for r in requests:
        assert r.arrived == 0.0 or any(abs(r.arrived - end) < 1e-3 for end in ends)


def test_few_pages_preempt() -> None:
    """Two answers grow beyond the pool: the younger one is computed again."""
    arrivals = [Arrival(0.0, 20, 25), Arrival(0.0, 20, 25)]
    replay = simulate(arrivals, replace(SERVING, num_pages=16), cost)
    assert sum(r.preemptions for r in replay.requests) > 0
    assert replay.replicas[0].peak_pages == 16
    assert simulate(arrivals, SERVING, cost).requests[1].preemptions == 0


def test_twice_the_rate_never_helps() -> None:
    """TTFT p50 of the same requests when they come twice as fast."""
    base = [Arrival(0.04 * i, 3 + 7 * (i % 5), 4 + 3 * (i % 7)) for i in range(120)]
    last = 0.0
    for scale in (1.0, 0.5, 0.25, 0.125, 0.0625):
        arrivals = [replace(a, at=a.at * scale) for a in base]
        now = summarise(simulate(arrivals, SERVING, cost)).ttft_ms.p50
        assert now >= last * 0.98
        last = now


def test_one_step_ahead_is_as_busy() -> None:
    """A device that gets its next step early never waits; requests join a step later."""
    arrivals = [Arrival(0.0, 8, 20)] * 4
    replay = simulate(arrivals, replace(SERVING, num_ahead=1), single)
    (use,) = replay.replicas
    assert use.busy[0] == pytest.approx(use.active) == pytest.approx(replay.span)


def test_pieces_of_prompts_follow_each_other_through_the_stages() -> None:
    def flat(sizes: BatchSizes) -> StepCost:
        return StepCost((1.0, 1.0, 1.0), (0.0,) * 3, 0.0)

    prompts = [Arrival(0.0, 8, 1), Arrival(0.0, 8, 1), Arrival(100.0, 8, 1)]
    assert replay_prompts(prompts, lambda n: [4, 4], flat) == [4.0, 6.0, 4.0]
    assert replay_prompts(prompts, lambda n: [8], flat) == [3.0, 4.0, 3.0]


def test_sizes_of_a_mixed_step() -> None:
    batch = StepBatch(
        "prefill", (1, 2, 3), [0] * 6, [0, 1, 2, 6], [9, 4, 8], [[], [], []], [True, False, True]
    )
    sizes = sizes_of(batch)
    assert sizes == BatchSizes(1, 9, (Piece(1, 4, False), Piece(4, 8, True)))
    assert (sizes.tokens, sizes.rows) == (6, 2)


def test_nearest_rank() -> None:
    values = percentiles([i / 1e3 for i in range(1, 101)])
    assert (values.p50, values.p90, values.p99, values.max) == (50, 90, 99, 100)
    assert percentiles([0.002]).p99 == 2


def test_refused() -> None:
    with pytest.raises(OptionError, match="without requests"):
        simulate([], SERVING, cost)
    with pytest.raises(OptionError, match="request 1 has no prompt"):
        simulate([Arrival(0, 1, 1), Arrival(0, 0, 1)], SERVING, cost)
    with pytest.raises(CapacityError, match=r"request 0 has 50 \+ 11 tokens, the context holds 60"):
        simulate([Arrival(0, 50, 11)], SERVING, cost)
    with pytest.raises(CapacityError, match="the context holds 40"):
        simulate([Arrival(0, 40, 1)], replace(SERVING, num_pages=10), cost)
