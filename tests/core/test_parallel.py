"""Partitions: numbers of ranks, what divides and what is said of what does not."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.errors import PartitionError
from sitsc.core.parallel import (
    Divisible,
    Partition,
    Place,
    check_partition,
    check_stages,
    even_stages,
    valid_tp,
)

SMOLLM2 = Divisible(heads=((9, 3),), intermediate=(1536,), experts=(), num_layers=30)
MIXTRAL = Divisible(heads=((32, 8),), intermediate=(), experts=((8, 14336),), num_layers=32)


def _refused(partition: Partition, model: Divisible) -> str:
    with pytest.raises(PartitionError) as caught:
        check_partition(partition, model)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_ranks_are_numbered_by_stage():
    partition = Partition(tp=3, pp=2, dp=2)
    places = [partition.place(rank) for rank in range(partition.num_ranks)]
    assert places[:4] == [Place(0, 0, 0), Place(0, 0, 1), Place(0, 0, 2), Place(0, 1, 0)]
    assert places[6] == Place(1, 0, 0) and len(set(places)) == 12
    with pytest.raises(PartitionError, match="rank 12 of 12"):
        partition.place(12)
    assert (partition.text(), Partition().text()) == ("TP 3 × PP 2 × DP 2", "one rank")


def test_what_does_not_divide_is_named_with_what_would():
    assert _refused(Partition(tp=2), SMOLLM2) == (
        "9 query heads do not divide by TP 2 — valid TP: 1, 3; more devices by PP"
    )
    heads = Divisible(((12, 8),), (), (), 4)
    assert "TP 3 neither divides 8 KV heads nor is a multiple" in _refused(Partition(tp=3), heads)
    narrow = Divisible(((8, 8),), (100,), (), 4)
    assert "an intermediate size of 100" in _refused(Partition(tp=8), narrow)
    assert "valid PP: 1 to 4" in _refused(Partition(pp=5), narrow)
    assert "PP 0 is less than 1" in _refused(Partition(pp=0), narrow)
    assert "without experts" in _refused(Partition(tp=2, ep=2), narrow)
    assert "valid EP: 1, 2, 4" in _refused(Partition(tp=4, ep=3), MIXTRAL)
    odd = Divisible(((32, 8),), (), ((8, 6),), 2)
    assert "experts of an intermediate size of 6 do not divide by TP 4" in _refused(
        Partition(tp=4), odd
    )
    check_partition(Partition(tp=8, ep=8, pp=2), odd)
    check_partition(Partition(tp=32, ep=8), MIXTRAL)
    assert valid_tp(SMOLLM2) == (1, 3)


@given(st.integers(1, 60), st.data())
def test_stages_cover_the_layers_evenly(layers: int, data: st.DataObject):
    stages = data.draw(st.integers(1, layers))
    bounds = even_stages(layers, stages)
    check_stages(bounds, layers)
    sizes = [high - low for low, high in pairwise(bounds)]
    assert len(sizes) == stages and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("bounds", [(0, 2), (1, 4), (0, 2, 2, 4), (0, 5), (0,), ()])
def test_bounds_that_do_not_cover(bounds: tuple[int, ...]):
    with pytest.raises(PartitionError, match="do not cover 4 layers"):
        check_stages(bounds, 4)
