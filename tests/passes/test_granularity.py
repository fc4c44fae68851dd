import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sitsc.core.links import load_link
from sitsc.passes.granularity import (
    best_size,
    decode_period_us,
    link_ranges,
    overlapped,
    piece_seconds,
    pipelined_us,
    search_pieces,
    size_range,
    two_stage_us,
)
from sitsc.passes.stage_search import layer_graph, stage_bounds

TOTAL = st.floats(1e3, 1e9)
RANKS = st.integers(2, 64)
FIXED = st.floats(1e-7, 1e-3)
RATE = st.floats(1e8, 1e12)
US = st.floats(0.1, 1e4)


def test_the_example_of_the_formula():
    """64 MiB over two devices at 400 GB/s with 6 µs a piece: 9 MB."""
    assert best_size(64 << 20, 2, 6e-6, 1 / 400e9) == pytest.approx(9e6, rel=0.02)


@given(TOTAL, RANKS, FIXED, RATE, st.floats(0.01, 100))
def test_it_is_the_minimum(total, ranks, fixed, rate, factor):
    best = best_size(total, ranks, fixed, 1 / rate)
    assume(best < total)
    least = piece_seconds(best, total, ranks, fixed, 1 / rate)
    assert least <= piece_seconds(best * factor, total, ranks, fixed, 1 / rate) * (1 + 1e-9)


@given(TOTAL, RANKS, FIXED, RATE)
def test_it_grows_with_bandwidth_and_fixed_cost_and_shrinks_with_ranks(total, ranks, fixed, rate):
    best = best_size(total, ranks, fixed, 1 / rate)
    assert best <= best_size(total, ranks, fixed, 1 / (2 * rate)) <= total
    assert best <= best_size(total, ranks, 2 * fixed, 1 / rate) <= total
    assert best >= best_size(total, 2 * ranks, fixed, 1 / rate)
    assert best_size(total, 1, fixed, 1 / rate) == total


@given(TOTAL, RANKS, FIXED, RATE)
def test_the_range_is_within_five_percent(total, ranks, fixed, rate):
    best = best_size(total, ranks, fixed, 1 / rate)
    assume(best < total)
    low, high = size_range(total, ranks, fixed, 1 / rate)
    assert low < best < high <= total
    least = piece_seconds(best, total, ranks, fixed, 1 / rate)
    for size in (low, high):
        assert piece_seconds(size, total, ranks, fixed, 1 / rate) <= 1.05 * least * (1 + 1e-9)


@pytest.mark.parametrize("name", ["nvlink", "pcie", "infiniband", "ethernet", "gloo"])
def test_every_link_has_ranges(name):
    found = link_ranges(load_link(name), 4)
    assert len(found) == 3 and link_ranges(load_link(name), 1) == ()
    assert all(r.low_bytes <= r.best_bytes <= r.high_bytes <= r.message_bytes for r in found)


@given(
    st.integers(64, 9000),
    st.floats(0.001, 1),
    st.floats(0, 50),
    st.floats(0.001, 1),
    st.floats(0, 50),
)
def test_overlap_finds_the_best_of_all(tokens, compute, fixed, comm, latency):
    """Real sizes are tried all, so that no size is better, the whole included."""

    def computing(n: int) -> float:
        return fixed + compute * n

    def sending(n: int) -> float:
        return latency + comm * n

    made = overlapped(tokens, computing, sending, tokens / 4)
    assert made.us <= made.whole_us == pytest.approx(computing(tokens) + sending(tokens))
    assert made.low <= made.size <= made.high and made.count == -(-tokens // made.size)
    for size in (64, 128, 256, 512, 1024):
        if size < tokens and -(-tokens // size) <= 64:
            cost = two_stage_us(computing(size), sending(size), -(-tokens // size))
            assert made.us <= cost * (1 + 1e-9)


def test_latency_alone_is_not_cut():
    made = search_pieces(100, [10, 20, 50], lambda size, count: 5.0 * count)
    assert (made.count, made.size) == (1, 100)


@given(st.lists(US, min_size=1, max_size=4), st.integers(1, 12), st.floats(0, 100))
def test_pipelines(stages, pieces, send):
    """Bounded below by the slowest stage and one piece, above by doing one after the other."""
    us = pipelined_us([stages] * pieces, send)
    sends = send * (len(stages) - 1)
    assert us >= max(pieces * max(stages), sum(stages) + sends) * (1 - 1e-9)
    assert us <= pieces * (sum(stages) + sends) * (1 + 1e-9)
    if send == 0:
        assert us == pytest.approx(sum(stages) + (pieces - 1) * max(stages))
    assert pipelined_us([], send) == 0


@given(st.lists(US, min_size=1, max_size=8), st.integers(1, 16), st.floats(0, 100))
def test_decode_periods(stages, count, send):
    us = decode_period_us(stages, send, count)
    assert us >= sum(stages) and us >= count * max(stages)
    assert decode_period_us(stages, send, count + 1) >= us
    if len(stages) == 1:
        assert us == pytest.approx(count * stages[0])


@given(st.lists(US, min_size=1, max_size=9), st.data())
def test_stages_are_the_best_there_are(times, data):
    """Against every way of cutting: sum of layers, at least one each, the shortest longest."""
    stages = data.draw(st.integers(1, len(times)))
    bounds = stage_bounds(layer_graph(times, 0, 0), stages)
    assert bounds[0] == 0 and bounds[-1] == len(times) and len(bounds) == stages + 1
    assert all(a < b for a, b in itertools.pairwise(bounds))

    def longest(cuts: tuple[int, ...]) -> float:
        return max(math.fsum(times[a:b]) for a, b in itertools.pairwise(cuts))

    inner = itertools.combinations(range(1, len(times)), stages - 1)
    best = min(longest((0, *cut, len(times))) for cut in inner)
    assert longest(bounds) <= best * (1 + 1e-9)


def test_a_heavy_head_gets_fewer_layers():
    assert stage_bounds(layer_graph([1.0] * 32, 0.0, 8.0), 2) == (0, 20, 32)
    assert stage_bounds(layer_graph([1.0] * 32, 0.0, 2.3), 4)[-2] > 24
