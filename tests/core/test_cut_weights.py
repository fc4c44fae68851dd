"""A cut of a weight holds the same values as the cut of the whole one, however it is stored."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sitsc.core.cut_weights import cut_weight, zero_weight
from sitsc.core.errors import UnsupportedModelError
from sitsc.core.ranges import Cut, Ranges, cuts_of, elements, length, ranges_of, within
from sitsc.core.weights import TensorSlice, WeightSpec, materialise

TENSORS = {
    "a": (12, 10),
    "b": (7, 10),
    "turned": (10, 12),
    "vector": (12,),
    "stacked": (4, 10, 12),
    "biases": (4, 12),
    **{f"expert_{i}": (6, 10) for i in range(8)},
}


def read(name: str, start: int, stop: int) -> Tensor:
    """Every element is its number in the tensor, and the tensors differ."""
    shape = TENSORS[name]
    first = 1000 * sorted(TENSORS).index(name)
    return torch.arange(first, first + math.prod(shape)).float().view(shape)[start:stop]


def _spec(shape: tuple[int, ...], *sources: TensorSlice) -> WeightSpec:
    return WeightSpec("w", "weight", sources, shape, "float32", "plain", "")


SPECS = {
    "rows": _spec((19, 10), TensorSlice("a", 0, 12), TensorSlice("b", 0, 7)),
    "some rows": _spec((9, 10), TensorSlice("a", 2, 8), TensorSlice("b", 1, 4)),
    "columns": _spec((12, 10), TensorSlice("turned", 0, 12, "columns")),
    "vector": _spec((12,), TensorSlice("vector", 0, 12)),
    "experts": _spec((8, 6, 10), *(TensorSlice(f"expert_{i}", 0, 6) for i in range(8))),
    "stacked": _spec(
        (8, 6, 10),
        *(
            TensorSlice("stacked", i, i + 1, f"transposed {turn}")
            for i in range(4)
            for turn in ("even", "odd")
        ),
    ),
    "one tensor": _spec((4, 10, 12), TensorSlice("stacked", 0, 4, "stacked")),
    "biases": _spec(
        (8, 6),
        *(TensorSlice("biases", i, i + 1, turn) for i in range(4) for turn in ("even", "odd")),
    ),
}


@st.composite
def _ranges(draw: st.DrawFn, size: int) -> Ranges:
    bounds = draw(st.lists(st.integers(0, size), min_size=2, max_size=4, unique=True))
    bounds = sorted(bounds[: len(bounds) // 2 * 2])
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


@given(st.data())
def test_a_cut_of_a_cut(data: st.DataObject):
    """Along any dimensions, one after another."""
    spec = data.draw(st.sampled_from(sorted(SPECS)).map(SPECS.__getitem__))
    wanted = materialise(spec, read)
    for _ in range(data.draw(st.integers(1, 3))):
        dim = data.draw(st.integers(0, len(spec.shape) - 1))
        ranges = data.draw(_ranges(spec.shape[dim]))
        spec = cut_weight(spec, dim, ranges)
        wanted = wanted.index_select(dim, torch.tensor(elements(ranges)))
        assert spec.shape == tuple(wanted.shape)
        for source in spec.sources:
            shape = spec.source_shape(source)
            assert shape[0] <= TENSORS[source.tensor][0] and shape[1:] == TENSORS[source.tensor][1:]
    assert torch.equal(materialise(spec, read), wanted)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_rows_past_the_end_are_zeros_in_every_format(kind: str):
    spec = cut_weight(SPECS["rows"], 0, ((15, 22),))
    packed = replace(spec, dtype=kind, format="n16" if kind == "float32" else "n16k2")
    found = materialise(packed, read)
    plain = materialise(spec, read)
    assert spec.shape == (7, 10)
    assert bool((plain[4:] == 0).all()) and bool((plain[:4] != 0).all())
    assert found.shape == packed.stored_shape
    assert bool((materialise(zero_weight(spec), read) == 0).all())
    scales = materialise(replace(spec, role="scale", shape=spec.shape[:1]), read)
    assert bool((scales[:4] > 0).all()) and not bool(scales[4:].any())


def test_only_the_rows_of_a_slice_are_read():
    """And of a weight that lies turned only the rows of the file that hold its columns."""
    seen: list[tuple[str, int, int]] = []

    def watched(name: str, start: int, stop: int) -> Tensor:
        seen.append((name, start, stop))
        return read(name, start, stop)

    materialise(cut_weight(SPECS["rows"], 0, ((3, 5), (14, 16))), watched)
    materialise(cut_weight(SPECS["columns"], 1, ((5, 10),)), watched)
    materialise(cut_weight(SPECS["experts"], 1, ((3, 6),)), watched)
    assert seen[:3] == [("a", 3, 5), ("b", 2, 4), ("turned", 5, 10)]
    assert {item[1:] for item in seen[3:]} == {(3, 6)}


def test_experts_in_one_tensor_cannot_be_given_out():
    spec = _spec((2, 6, 10), TensorSlice("a", 0, 12))
    with pytest.raises(UnsupportedModelError, match="cannot be cut"):
        cut_weight(spec, 0, ((0, 1),))


def test_words_of_cuts():
    cut = Cut(-1, ((0, 4), (8, 12)), 16)
    assert cut.word == "-1[0:4,8:12/16]"
    assert cuts_of(f"transposed even {cut.word} -2[1:2/3]") == (cut, Cut(-2, ((1, 2),), 3))
    assert within(cut.ranges, ((2, 6),)) == ((2, 4), (8, 10))
    assert ranges_of(elements(cut.ranges)) == cut.ranges and length(cut.ranges) == 8
