"""Cutting a weight: the spec of a part of a buffer, made of slices of the same checkpoint tensors.

In: a `WeightSpec` that is not packed yet, a dimension and ranges of it. Out: the spec of that part,
under the same name. Rows past the end are zeros. Reads nothing.
"""

import re
from dataclasses import replace

import torch

from sitsc.core.ranges import Cut, Ranges, cuts_of, elements, length, within
from sitsc.core.weights import DTYPES, ZEROS, TensorSlice, WeightSpec, constant_spec, materialise


def cut_weight(spec: WeightSpec, dim: int, ranges: Ranges) -> WeightSpec:
    """Elements `ranges` of dimension `dim` of a plain weight or constant."""
    if spec.role == "constant":
        return _cut_constant(spec, dim, ranges)
    shape = (*spec.shape[:dim], length(ranges), *spec.shape[dim + 1 :])
    if dim:
        sources = [_within(spec, s, dim, ranges) for s in spec.sources]
    elif len(spec.shape) == 3:
        sources = _matrices(spec, ranges)
    else:
        sources = [piece for start, stop in ranges for piece in _rows(spec, start, stop)]
    return replace(spec, shape=shape, sources=tuple(sources))


def zero_weight(spec: WeightSpec) -> WeightSpec:
    """A weight of the same form that holds zeros alone."""
    return replace(spec, sources=(_zeros(spec.shape[0]),))


def _zeros(rows: int) -> TensorSlice:
    return TensorSlice("", 0, rows, ZEROS)


def _cut_constant(spec: WeightSpec, dim: int, ranges: Ranges) -> WeightSpec:
    value = materialise(spec, lambda name, start, stop: torch.empty(0, dtype=DTYPES[spec.dtype]))
    chosen = torch.tensor(elements(ranges))
    return constant_spec(spec.name, value.index_select(dim, chosen))


def _rows(spec: WeightSpec, start: int, stop: int) -> list[TensorSlice]:
    """Rows [start, stop) of the concatenated slices; zeros past their end."""
    found, base = [], 0
    for piece in spec.sources:
        low, high = max(start, base), min(stop, base + piece.stop - piece.start)
        if low < high:
            first = piece.start + low - base
            found.append(replace(piece, start=first, stop=first + high - low))
        base += piece.stop - piece.start
    padding = stop - max(start, base)
    return [*found, _zeros(padding)] if padding > 0 else found


def _matrices(spec: WeightSpec, ranges: Ranges) -> list[TensorSlice]:
    """Whole matrices of a stack whose slices hold one each."""
    if len(spec.sources) != spec.shape[0]:
        raise ValueError(f"{spec.name} does not hold one matrix a slice")
    return [spec.sources[index] for index in elements(ranges)]


def _within(spec: WeightSpec, source: TensorSlice, dim: int, ranges: Ranges) -> TensorSlice:
    """The slice with a cut of a later dimension."""
    words = source.part.split()
    if source.zeros:
        return source
    in_rows = len(spec.shape) == 3 and dim == 1 and "transposed" not in words
    if in_rows and len(ranges) == 1 and source.stop - source.start == spec.shape[1]:
        ((start, stop),) = ranges
        return replace(source, start=source.start + start, stop=source.start + stop)
    cut = Cut(dim - len(spec.shape), ranges, spec.shape[dim])
    kept = [word for word in words if not re.match(r"-\d+\[", word)]
    cuts = {old.dim: old for old in cuts_of(source.part)}
    if (old := cuts.get(cut.dim)) is not None:
        cut = Cut(cut.dim, within(old.ranges, ranges), old.whole)
    cuts[cut.dim] = cut
    return replace(source, part=" ".join([*kept, *(cuts[d].word for d in sorted(cuts))]))
