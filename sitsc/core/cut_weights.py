"""Cutting a weight: the spec of a part of a buffer, made of slices of the same checkpoint tensors.

In: a `WeightSpec` that is not packed yet, a dimension and ranges of it. Out: the spec of that part,
under the same name. Rows past the end are zeros. Reads nothing.
"""

import re
from dataclasses import replace

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.ranges import Cut, Ranges, cuts_of, elements, length, within
from sitsc.core.weights import STACKED, ZEROS, TensorSlice, WeightSpec


def cut_weight(spec: WeightSpec, dim: int, ranges: Ranges) -> WeightSpec:
    """Elements `ranges` of dimension `dim` of a plain weight. Raises UnsupportedModelError."""
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


def _rows(spec: WeightSpec, start: int, stop: int) -> list[TensorSlice]:
    """Rows [start, stop) of the concatenated slices; zeros past their end."""
    found, base = [], 0
    for piece in spec.sources:
        low, high = max(start, base), min(stop, base + piece.stop - piece.start)
        if low < high:
            first, part = piece.start + low - base, _with_whole(piece)
            found.append(replace(piece, start=first, stop=first + high - low, part=part))
        base += piece.stop - piece.start
    padding = stop - max(start, base)
    return [*found, _zeros(padding)] if padding > 0 else found


def _with_whole(source: TensorSlice) -> str:
    """The part of a slice; of columns with the number that the tensor has, before they are cut."""
    if "columns" not in source.part.split() or any(c.dim == -2 for c in cuts_of(source.part)):
        return source.part
    return f"{source.part} {Cut(-2, ((0, source.stop),), source.stop).word}"


def _matrices(spec: WeightSpec, ranges: Ranges) -> list[TensorSlice]:
    """Whole matrices of a stack: each a slice of its own, or several in one tensor."""
    every: list[TensorSlice] = []
    for source in spec.sources:
        if _in_one_tensor(source):
            every += [
                replace(source, start=i, stop=i + 1) for i in range(source.start, source.stop)
            ]
        else:
            every.append(source)
    if len(every) != spec.shape[0]:
        raise UnsupportedModelError(
            f"experts of {spec.name} lie in one tensor in a way that cannot be cut",
            hint="leave out EP",
        )
    return [every[index] for index in elements(ranges)]


def _in_one_tensor(source: TensorSlice) -> bool:
    """Whether the rows of a slice of a stack are matrices."""
    words = source.part.split()
    return STACKED in words or "transposed" in words


def _within(spec: WeightSpec, source: TensorSlice, dim: int, ranges: Ranges) -> TensorSlice:
    """The slice with a cut of a later dimension."""
    words = source.part.split()
    if source.zeros:
        return source
    in_rows = len(spec.shape) == 3 and dim == 1 and not _in_one_tensor(source)
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
