"""Ranges of elements along a dimension, and the words by which a weight slice names them.

`Ranges` are [start, stop) pairs in the order in which the elements lie. The word of a cut is
"-1[0:16,32:48/64]": dimension counted from the end, ranges, size of the whole dimension.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Ranges = tuple[tuple[int, int], ...]
_WORD = re.compile(r"(-\d+)\[([\d:,]+)/(\d+)\]")


def length(ranges: Ranges) -> int:
    """Elements in all ranges."""
    return sum(stop - start for start, stop in ranges)


def elements(ranges: Ranges) -> list[int]:
    """The elements, in order."""
    return [index for start, stop in ranges for index in range(start, stop)]


def ranges_of(indices: Iterable[int]) -> Ranges:
    """The fewest ranges that hold `indices` in their order."""
    found: list[list[int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1][1] += 1
        else:
            found.append([index, index + 1])
    return tuple((start, stop) for start, stop in found)


def scaled(ranges: Ranges, factor: int) -> Ranges:
    """The ranges where each element has become `factor` of them."""
    return joined((start * factor, stop * factor) for start, stop in ranges)


def joined(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The ranges with neighbours made one and empty ones left out."""
    found: list[tuple[int, int]] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return tuple(found)


def within(ranges: Ranges, inner: Ranges) -> Ranges:
    """Elements `inner` of the elements that `ranges` hold."""
    found, base = [], 0
    for start, stop in ranges:
        for low, high in inner:
            first, last = max(low - base, 0), min(high - base, stop - start)
            if first < last:
                found.append((low, start + first, start + last))
        base += stop - start
    return joined((first, last) for _, first, last in sorted(found))


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranges of dimension `dim` (negative: from the end), which has `whole` elements."""

    dim: int
    ranges: Ranges
    whole: int

    @property
    def word(self) -> str:
        """The cut as a word of `TensorSlice.part`."""
        pieces = ",".join(f"{start}:{stop}" for start, stop in self.ranges)
        return f"{self.dim}[{pieces}/{self.whole}]"

    def of(self, value: "Tensor") -> "Tensor":
        """What the cut keeps of a tensor; a view where it is one range."""
        parts = [value.narrow(self.dim, a, b - a) for a, b in self.ranges]
        if len(parts) == 1:
            return parts[0]
        import torch  # noqa: PLC0415  (ranges in plans are read without it)

        return torch.cat(parts, self.dim)


def cuts_of(part: str) -> tuple[Cut, ...]:
    """The cuts that a slice's `part` names."""
    found = []
    for dim, pieces, whole in _WORD.findall(part):
        pairs = (piece.split(":") for piece in pieces.split(","))
        found.append(Cut(int(dim), tuple((int(a), int(b)) for a, b in pairs), int(whole)))
    return tuple(found)
