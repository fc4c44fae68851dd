"""Loads of replicas: against the simulator, and what holds for every load."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.errors import PartitionError
from sitsc.core.parallel import Partition
from sitsc.core.serving.scheduler import SchedulerLimits
from sitsc.core.serving.simulator import Arrival, RequestTimes, Serving, simulate
from sitsc.passes.arrivals import draw
from sitsc.passes.batch_time import BatchTime
from sitsc.passes.loads import closed, even, opened, sustained
from sitsc.passes.partition import Candidate, Rejected, Search
from sitsc.passes.partition_report import choose, fewest_devices
from sitsc.passes.workloads import Slo, Workload
from tests.partition_records import search

LOAD = Workload()
ROUNDS = 12  # requests of each place in a closed loop
ARRIVALS = 1000  # requests of an open loop
ROOM = 2048


@pytest.fixture(scope="module")
def llama() -> Search:
    return search("llama3-8b", 8)


def served(where: Search, partition: Partition, workload: Workload) -> tuple[RequestTimes, ...]:
    """The requests of a replay: as many at once as the workload says, or at its rate."""
    sizes = SchedulerLimits(256, ROOM + 256, ROOM, 8192)
    serving = Serving(sizes, 1 << 14, 64, partition.dp, 1)
    at_once = 0 if workload.rate else workload.concurrency
    times = [a.at for a in draw(ARRIVALS, workload.rate, 0).arrivals] if workload.rate else []
    many = [
        Arrival(at, workload.prompt_tokens, workload.output_tokens)
        for at in times or [0.0] * (ROUNDS * at_once)
    ]
    cost = BatchTime(where.replica(partition))
    return simulate(many, serving, cost, concurrency=at_once).requests


def speed(requests: tuple[RequestTimes, ...]) -> float:
    """Tokens a second in the middle of a replay: neither the first prompts nor the last answers."""
    last = max(r.ended for r in requests)
    low, high = last / 4, 3 * last / 4

    def share(r: RequestTimes) -> float:
        inside = min(r.ended, high) - max(r.arrived, low)
        return r.output_tokens * max(0.0, inside) / (r.ended - r.arrived)

    return sum(map(share, requests)) / (high - low)


# --- requests that do not divide by replicas --------------------------------------------------


@pytest.mark.parametrize(
    ("partition", "counts"),
    [
        (Partition(dp=8), (3, 9, 15, 17, 33)),
        (Partition(tp=2, dp=4), (5, 15, 33)),
        (Partition(tp=4, dp=2), (1, 15, 33)),
    ],
    ids=str,
)
def test_tokens_a_second_are_those_of_the_simulator(llama, partition, counts):
    """With C requests at once on replicas that C does not divide by, within 4 %."""
    for count in counts:
        workload = Workload(concurrency=count)
        requests = served(llama, partition, workload)
        load = closed(llama.replica(partition), partition.dp, workload, 256)
        assert load.tokens_per_s == pytest.approx(speed(requests), rel=0.04), count
        slowest = max(r.tpot for r in requests)
        assert load.sequences == count and load.waiting == 0
        assert load.tpot_ms == pytest.approx(1e3 * slowest, rel=0.15), count


@given(st.integers(1, 12), st.integers(1, 300), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_replicas_share_requests(llama, dp, count, most):
    """Each request is somewhere; the sum is that of replicas alone; one more never hurts much."""
    replica = llama.replica(Partition(tp=2))
    load = closed(replica, dp, Workload(concurrency=count), most)
    assert load.sequences + load.waiting == count
    assert load.batch <= most and (load.waiting == 0 or load.sequences == dp * most)
    parts = [load.sequences // dp + (i < load.sequences % dp) for i in range(dp)]
    alone = [even(replica, 1, Workload(), batch) for batch in parts if batch]
    assert load.batch == max(parts) and sum(parts) == load.sequences
    assert load.tokens_per_s == pytest.approx(sum(one.tokens_per_s for one in alone))
    assert load.tpot_ms == max(one.tpot_ms for one in alone)
    more = closed(replica, dp, Workload(concurrency=count + 1), most)
    assert more.tokens_per_s > 0.97 * load.tokens_per_s


def test_the_choice_does_not_flip_between_crossovers(llama):
    """At every count the fastest is that of the last crossover; a flip gains at once and after."""
    found = llama.run(8, Workload(), Slo())
    for count in (*range(1, 32), 40, 60, 90, 150, 250, 500, 1000):
        best = llama.run(8, Workload(concurrency=count), Slo(), flips=False).ranked[0]
        last = [f for f in found.flips if f.concurrency <= count][-1]
        assert best.partition == last.partition, count


# --- requests that come at a rate -------------------------------------------------------------


@given(
    st.sampled_from([(2, 1, 1, 4), (1, 1, 1, 8), (4, 1, 1, 2), (1, 4, 1, 2)]), st.floats(0.5, 60)
)
@settings(max_examples=25, deadline=None)
def test_a_rate_takes_no_more_sequences_than_it_needs(llama, numbers, rate):
    """Enough tokens a second, not enough with one sequence less in each replica."""
    partition, workload = Partition(*numbers), Workload(rate=rate)
    replica, need = llama.replica(partition), rate * Workload().output_tokens
    load = opened(replica, partition.dp, workload, 384)
    assert load is not None and load.tokens_per_s == need
    enough = even(replica, partition.dp, workload, load.batch)
    assert enough.tokens_per_s >= need and enough.tpot_ms == load.tpot_ms
    if load.batch > 1:
        assert even(replica, partition.dp, workload, load.batch - 1).tokens_per_s < need


def test_a_rate_is_as_fast_as_in_the_simulator(llama):
    """Where eight devices are busy but not full: the mean TPOT, to a fifth."""
    partition, workload = Partition(tp=2, dp=4), Workload(rate=70.0)
    requests = served(llama, partition, workload)
    load = opened(llama.replica(partition), partition.dp, workload, 384)
    mean = 1e3 * sum(r.tpot for r in requests) / len(requests)
    assert load is not None and mean < load.tpot_ms < 1.2 * mean


def test_what_is_sustained_is_the_most(llama):
    """It is served, a little more is not, and the one refused for its rate is nearest by it."""
    best = {}
    for numbers in ((2, 1, 1, 4), (1, 1, 1, 8), (4, 1, 1, 2)):
        partition = Partition(*numbers)
        made = llama.evaluate(partition, Workload(rate=1000.0), Slo())
        assert isinstance(made, Rejected)
        best[partition] = made.rate
        for share, kind in ((0.999, Candidate), (1.001, Rejected)):
            workload = Workload(rate=share * made.rate)
            assert isinstance(llama.evaluate(partition, workload, Slo()), kind)
        most = llama.most_batch(llama.evaluate(partition, Workload(rate=1.0), Slo()).budget, LOAD)
        replica = llama.replica(partition)
        assert sustained(replica, partition.dp, LOAD, most) == pytest.approx(made.rate)
    nearest = max(best, key=lambda p: best[p])
    with pytest.raises(PartitionError, match=f"{nearest.text()} comes nearest") as caught:
        llama.run(8, Workload(rate=1000.0), Slo())
    assert f"with {best[nearest]:.3g}" in str(caught.value)


# --- limits -----------------------------------------------------------------------------------


@given(st.integers(1, 300), st.floats(1, 30))
@settings(max_examples=30, deadline=None)
def test_limits_hold_for_what_was_asked(llama, count, tpot):
    """As many at once as a candidate is said to hold keep the limit, and one more do not."""
    limits = Slo(tpot_ms=tpot)
    for numbers in ((8,), (2, 1, 1, 4), (1, 1, 1, 8)):
        made = llama.evaluate(Partition(*numbers), Workload(concurrency=count), limits)
        assert isinstance(made, Candidate) and made.meets == (made.load.tpot_ms <= tpot)
        assert made.holds >= count if made.meets else made.holds < count
        for more in (0, 1) if made.holds else (1,):
            asked = Workload(concurrency=made.holds + more)
            other = llama.evaluate(Partition(*numbers), asked, limits)
            assert isinstance(other, Candidate) and other.meets == (more == 0)


def test_fewest_devices_serve_what_was_asked(llama):
    """More requests at once take more devices; fewer devices do not keep the limits with them."""
    limits, before = Slo(ttft_ms=200, tpot_ms=10), 1
    counts = []
    for workload in (*(Workload(concurrency=n) for n in (1, 32, 100, 190)), Workload(rate=60.0)):
        few = fewest_devices(llama, 8, workload, limits)
        assert few is not None and few[1].meets
        assert few[1].load.sequences >= (workload.concurrency if workload.rate == 0 else 1)
        if few[0] > 1:
            assert fewest_devices(llama, few[0] - 1, workload, limits) is None
        counts.append(few[0])
    assert counts[:4] == sorted(counts[:4]) and counts[0] == before < counts[1] < counts[3]
    assert fewest_devices(llama, 8, Workload(concurrency=400), limits) is None


def test_requests_without_room_are_not_served(llama):
    """They wait, which no limit allows, and the error says how many and what would be kept."""
    made = llama.evaluate(Partition(8), Workload(concurrency=4096), Slo(ttft_ms=1e6))
    assert isinstance(made, Candidate) and made.load.sequences < 4096 and not made.meets
    assert made.load.sequences + made.load.waiting == 4096
    assert made.miss == 4096 / made.load.sequences and made.holds == made.load.sequences
    with pytest.raises(PartitionError, match="with 4096 at once: the nearest is") as caught:
        choose(llama, 8, Workload(concurrency=4096), Slo(ttft_ms=200, tpot_ms=10))
    assert "requests wait" in str(caught.value) and "at most " in str(caught.value)
