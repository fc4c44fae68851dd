import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.links import made
from sitsc.core.errors import OptionError, PlanError
from sitsc.core.links import (
    STEPS,
    Link,
    fitted,
    link_names,
    link_text,
    load_link,
    measured_link,
    read_link,
    seconds,
)
from sitsc.passes.collectives import (
    Topology,
    all_gather,
    all_reduce,
    all_to_all,
    send,
    topology,
)

LINKS = {name: load_link(name) for name in link_names()}
SIZES = st.integers(1, 1 << 28)
RANKS = st.integers(1, 256)
ROOT = Path(__file__).parents[2]


def faster(link: Link, factor: float) -> Link:
    algorithms = {
        name: replace(a, bytes_per_s=a.bytes_per_s * factor) for name, a in link.algorithms.items()
    }
    return replace(link, algorithms=algorithms)


@pytest.mark.parametrize("name", link_names())
def test_files_hold_their_fit_and_source(name):
    link = load_link(name)
    assert link.name == name and link.title and "send" in link.algorithms
    for key, a in link.algorithms.items():
        assert a.source and a.latency_s >= 0 and a.bytes_per_s > 0
        if a.points:
            again = fitted(key, a.ranks, list(a.points), a.source)
            assert (again.latency_s, again.bytes_per_s) == pytest.approx(
                (a.latency_s, a.bytes_per_s), rel=1e-2, abs=1e-9
            )


def test_files_are_what_bench_writes():
    data = json.loads((ROOT / "bench" / "data" / "links.json").read_text())
    for name in data:
        assert load_link(name) == read_link(link_text(made(name, data)), name)


def test_two_gpus_as_measured():
    """All-reduces of two H200 in a graph: within a fifth of the fastest that was measured."""
    where = topology(2, 1, "nvlink", "infiniband")
    measured = {8 << 10: 1.8, 128 << 10: 2.3, 512 << 10: 3.4, 2 << 20: 8.4, 128 << 20: 412}
    for nbytes, us in measured.items():
        assert all_reduce(nbytes, 2, where).us == pytest.approx(us, rel=0.2)
    assert all_reduce(8 << 10, 2, where).algorithm == "one_shot"
    assert all_reduce(128 << 20, 2, where).algorithm == "two_shot"
    many = topology(16, 1, "nvlink", "infiniband")
    assert all_reduce(1 << 30, 16, many).algorithm == "ring"
    assert all_reduce(1 << 13, 16, many).algorithm == "tree"


@given(SIZES, RANKS, st.sampled_from(sorted(LINKS)))
def test_one_rank_has_nothing_to_say(nbytes, ranks, name):
    where = Topology(ranks, LINKS[name], None)
    for call in (all_reduce, all_gather, all_to_all):
        assert call(nbytes, 1, where).us == 0
        assert call(0, ranks, where).us == 0
        assert call(nbytes, ranks, where).us > 0 or ranks == 1


@given(SIZES, SIZES, st.integers(2, 64), st.sampled_from(sorted(LINKS)))
def test_more_bytes_take_longer(a, b, ranks, name):
    where = Topology(ranks, LINKS[name], None)
    low, high = sorted((a, b))
    for call in (all_reduce, all_gather, all_to_all):
        assert call(low, ranks, where).us <= call(high, ranks, where).us * (1 + 1e-9)
    assert send(low, where, across=False).us <= send(high, where, across=False).us


@given(SIZES, st.integers(2, 64), st.floats(1, 8), st.sampled_from(sorted(LINKS)))
def test_more_bandwidth_is_never_slower(nbytes, ranks, factor, name):
    link = LINKS[name]
    slow, fast = Topology(ranks, link, None), Topology(ranks, faster(link, factor), None)
    for call in (all_reduce, all_gather, all_to_all):
        assert call(nbytes, ranks, fast).us <= call(nbytes, ranks, slow).us * (1 + 1e-9)


@given(st.integers(1 << 10, 1 << 26), st.sampled_from((2, 4)), st.just(2))
def test_nodes_apart_are_slower_than_one(nbytes, inside, nodes):
    together = topology(inside * nodes, 1, "nvlink", "infiniband")
    apart = topology(inside * nodes, nodes, "nvlink", "infiniband")
    assert all_reduce(nbytes, inside * nodes, apart).us >= (
        all_reduce(nbytes, inside * nodes, together).us
    )
    assert all_reduce(nbytes, inside, apart) == all_reduce(nbytes, inside, together)
    assert send(nbytes, apart, across=True).us > 0


@given(
    st.sampled_from(sorted(STEPS)),
    st.integers(2, 9),
    st.floats(1e-6, 1e-3),
    st.floats(1e8, 1e12),
)
def test_a_fit_finds_what_made_the_points(name, ranks, latency, rate):
    steps, share = STEPS[name](ranks)
    sizes = [1 << i for i in range(10, 28, 3)]
    points = [(s, steps * latency + share * s / rate) for s in sizes]
    a = fitted(name, ranks, points, "made up")
    for size, t in points:
        assert seconds(a, name, size, ranks) == pytest.approx(t, rel=0.02)


def test_fits_of_noise_stay_possible():
    link = measured_link("x", "x", 2, [("all_reduce", 8, 1e-3), ("all_reduce", 99999, 1e-6)], "y")
    a = link.algorithms["ring"]
    assert a.latency_s >= 0 and a.bytes_per_s > 0


def test_refused():
    with pytest.raises(OptionError, match="unknown link"):
        load_link("carrier-pigeon")
    with pytest.raises(OptionError, match="no link"):
        load_link("nowhere.json")
    with pytest.raises(PlanError):
        read_link("{}", "x")
    with pytest.raises(OptionError, match=r"do not divide.*--nodes 2"):
        str_of(lambda: topology(8, 3, "nvlink", "infiniband"))


def str_of(call) -> None:
    """Raises again with the whole line as the message."""
    try:
        call()
    except OptionError as error:
        raise OptionError(str(error)) from None
