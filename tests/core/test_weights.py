"""Materialising weight buffers: slices, casts, quantisation and packing against plain torch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sitsc.core import weight_formats, weights
from sitsc.core.cut_weights import cut_weight
from sitsc.core.ranges import Cut
from sitsc.core.weights import DTYPES, TensorSlice, WeightSpec, constant_spec, materialise

COLUMNS = 11
TENSORS = {
    name: torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows))
    for name, rows in (("a", 5), ("b", 40), ("c", 17))
}
VECTOR = torch.arange(23.0)


def _read(name: str, start: int, stop: int) -> Tensor:
    source = VECTOR if name == "vector" else TENSORS[name]
    assert 0 <= start <= stop <= source.shape[0], "reads stay inside the tensor"
    return source[start:stop]


def _spec(sources: list[TensorSlice], dtype: str, kind: str, role: str = "weight") -> WeightSpec:
    rows = sum(s.stop - s.start for s in sources)
    shape = (rows,) if role == "scale" else (rows, COLUMNS)
    return WeightSpec("w", role, tuple(sources), shape, dtype, kind, "")


@st.composite
def _slices(draw: st.DrawFn) -> list[TensorSlice]:
    found = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(TENSORS)))
        start = draw(st.integers(0, TENSORS[name].shape[0] - 1))
        found.append(TensorSlice(name, start, draw(st.integers(start + 1, TENSORS[name].shape[0]))))
    return found


def _whole(sources: list[TensorSlice]) -> Tensor:
    return torch.cat([TENSORS[s.tensor][s.start : s.stop] for s in sources])


@given(_slices(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_plain_buffers_are_the_rows_in_order(sources: list[TensorSlice], dtype: str):
    spec = _spec(sources, dtype, "plain")
    made = materialise(spec, _read)
    assert torch.equal(made, _whole(sources).to(DTYPES[dtype]))
    _agrees(spec, made)


@given(_slices(), st.sampled_from(["float32", "bfloat16", "int8"]), st.sampled_from([16, 32, 4096]))
def test_packed_buffers_hold_the_same_rows(sources: list[TensorSlice], dtype: str, chunk: int):
    """Also when they are packed a few rows at a time."""
    kind = weight_formats.format_of(DTYPES[dtype])
    spec, whole = _spec(sources, dtype, kind), _whole(sources)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_CHUNK_ROWS", chunk)
        made = materialise(spec, _read)
        scales = materialise(_spec(sources, "float32", kind, "scale"), _read)
    wanted = weight_formats.quantize_int8(whole)[0] if dtype == "int8" else whole.to(DTYPES[dtype])
    assert torch.equal(weight_formats.unpack(made, whole.shape[0], COLUMNS, kind), wanted)
    assert torch.equal(made, weight_formats.pack(wanted, kind))
    _agrees(spec, made)
    rows = whole.shape[0]
    torch.testing.assert_close(scales[:rows], whole.abs().amax(1) / 127)
    assert scales.shape[0] % weight_formats.BLOCK_ROWS == 0
    assert not scales[rows:].any()
    if dtype == "int8":
        error = (wanted * scales[:rows, None] - whole).abs().amax(1)
        assert bool((error <= scales[:rows] * 0.5001).all())


def _agrees(spec: WeightSpec, made: Tensor) -> None:
    assert tuple(made.shape) == tuple(spec.stored_shape)
    assert made.dtype == DTYPES[spec.dtype]
    assert made.is_contiguous()
    assert made.numel() * made.element_size() == spec.nbytes


def test_vectors_are_rows_too():
    pieces = (TensorSlice("vector", 3, 5), TensorSlice("vector", 0, 2))
    spec = WeightSpec("v", "weight", pieces, (4,), "bfloat16", "plain", "")
    assert materialise(spec, _read).tolist() == [3.0, 4.0, 0.0, 1.0]


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(7),
        torch.randn(3, 2).bfloat16(),
        torch.tensor(2.5, dtype=torch.float16),  # no dimension at all
        torch.arange(12).view(3, 4).T,
        torch.tensor([True, False]),
        torch.empty(0),
    ],
)
def test_constants_travel_in_the_plan(value: Tensor):
    spec = constant_spec("c", value)

    def no_reading(*_: Any) -> Tensor:
        raise AssertionError("a constant reads no checkpoint")

    made = materialise(spec, no_reading)
    assert torch.equal(made, value)
    assert (made.dtype, made.shape) == (value.dtype, value.shape)
    assert spec.nbytes == value.numel() * value.element_size()


def test_constants_with_the_same_values_have_the_same_spec():
    assert constant_spec("c", torch.ones(3)) == constant_spec("c", torch.ones(6)[::2])
    assert constant_spec("c", torch.ones(3)) != constant_spec("c", torch.zeros(3))


def test_weights_that_are_not_finite_cannot_be_quantised():
    bad = {"a": torch.full((4, COLUMNS), float("nan"))}
    spec = _spec([TensorSlice("a", 0, 4)], "int8", "n16k2")
    with pytest.raises(ValueError, match="NaN"):
        materialise(spec, lambda name, start, stop: bad[name][start:stop])


def test_matrices_of_one_tensor_are_taken_apart():
    """Two experts in one tensor, three rows of gate above three of up; then a cut of those."""
    whole = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(3))
    halves = [f"stacked {Cut(-2, (pair,), 6).word}" for pair in ((0, 3), (3, 6))]
    sources = [TensorSlice("w", e, e + 1, half) for e in range(2) for half in halves]
    spec = WeightSpec("w", "weight", tuple(sources), (4, 3, 5), "float32", "plain", "")

    def read(name: str, start: int, stop: int) -> Tensor:
        assert (name, stop - start) == ("w", 1)
        return whole[start:stop]

    assert spec.source_shape(sources[-1]) == whole.shape
    assert torch.equal(materialise(spec, read), whole.view(4, 3, 5))
    for dim, ranges in ((0, ((2, 4),)), (1, ((1, 3),)), (2, ((0, 2),))):
        part = cut_weight(spec, dim, ranges)
        ((start, stop),) = ranges
        wanted = whole.view(4, 3, 5).narrow(dim, start, stop - start)
        assert torch.equal(materialise(part, read), wanted)
