"""Layouts: how a value of the whole graph lies on the ranks of a stage.

None: every rank has all of it. `Sharded`: each rank holds ranges of one dimension, equally many
elements. `Partial`: the value is the sum over the ranks, plus what is `rest` of it, once.
"""

from dataclasses import dataclass

from torch import fx

from sitsc.core.ranges import Ranges, joined, length, scaled


@dataclass(frozen=True, slots=True)
class Sharded:
    """Rank r holds the elements `held[r]` of dimension `dim`."""

    dim: int
    held: tuple[Ranges, ...]

    @property
    def local(self) -> int:
        """Elements that each rank holds."""
        return length(self.held[0])

    def at(self, dim: int) -> "Sharded":
        """The same ranges of another dimension."""
        return Sharded(dim, self.held)

    def contiguous(self, size: int) -> bool:
        """Whether one rank after the other gives elements 0 up to `size` in order."""
        flat = joined(piece for held in self.held for piece in held)
        return len(flat) == 1 and flat[0][0] == 0 and flat[0][1] >= size

    def repeats(self) -> bool:
        """Whether several ranks hold an element."""
        every = [i for held in self.held for start, stop in held for i in range(start, stop)]
        return len(set(every)) != len(every)


@dataclass(frozen=True, slots=True)
class Partial:
    """The sum over the ranks is the value, with `rest` (replicated) added."""

    rest: tuple[fx.Node, ...] = ()


Layout = Sharded | Partial | None


def even(size: int, parts: int) -> tuple[Ranges, ...]:
    """Equal ranges in order; the last ones go past the end where `parts` does not divide."""
    each = -(-size // parts)
    return tuple(((index * each, (index + 1) * each),) for index in range(parts))


def vocabulary(size: int, parts: int) -> tuple[Ranges, ...]:
    """Equal ranges of rows of a table or a head, padded where they are not; to whole blocks of 16.

    Equal ranges that are no multiple of 8 are padded too: GPUs gather logits by 16 bytes. Small
    ones are padded by as little as can be, so that no rank has all rows.
    """
    blocks = 1 if size % (8 * parts) == 0 or size < 32 * parts else 16 * parts
    return even(-(-size // blocks) * blocks, parts)


def kv_heads(heads: int, parts: int) -> tuple[Ranges, ...]:
    """The KV heads of each rank: equal ranges, or one each, repeated, where there are fewer."""
    if heads % parts == 0:
        return even(heads, parts)
    repeat = parts // heads
    return tuple(((rank // repeat, rank // repeat + 1),) for rank in range(parts))


def merged(held: tuple[Ranges, ...], inner: int) -> tuple[Ranges, ...]:
    """Ranges of a dimension whose elements become `inner` of the merged one."""
    return tuple(scaled(ranges, inner) for ranges in held)


def repeated(held: tuple[Ranges, ...], outer: int, size: int) -> tuple[Ranges, ...]:
    """Ranges of a dimension of `size` that is merged into `outer` copies of it."""
    return tuple(
        joined((i * size + start, i * size + stop) for i in range(outer) for start, stop in ranges)
        for ranges in held
    )


def divided(held: tuple[Ranges, ...], inner: int) -> tuple[Ranges, ...] | None:
    """Ranges of the outer dimension when one is split into parts of `inner`, or None."""
    if any(bound % inner for ranges in held for piece in ranges for bound in piece):
        return None
    return tuple(tuple((a // inner, b // inner) for a, b in ranges) for ranges in held)


def folded(held: tuple[Ranges, ...], outer: int, inner: int) -> tuple[Ranges, ...] | None:
    """Ranges of the inner dimension when each of `outer` parts is held alike, or None."""
    if outer == 1:
        return held
    found = []
    for ranges in held:
        first = clipped((ranges,), 0, inner)
        if first is None or repeated(first, outer, inner)[0] != ranges:
            return None
        found.append(first[0])
    return tuple(found)


def unless_whole(layout: Sharded, size: int) -> Layout:
    """The layout, None where every rank holds all `size` elements of the dimension."""
    return None if all(held == ((0, size),) for held in layout.held) else layout


def clipped(held: tuple[Ranges, ...], start: int, stop: int) -> tuple[Ranges, ...] | None:
    """What a slice [start, stop) keeps, counted from its start; None where ranks differ in size."""
    found = tuple(
        joined((max(a, start) - start, min(b, stop) - start) for a, b in ranges if a < stop)
        for ranges in held
    )
    sizes = {length(ranges) for ranges in found}
    return found if len(sizes) == 1 and sizes != {0} else None


def before(held: tuple[Ranges, ...], start: int) -> int | None:
    """Elements that lie before `start` on each rank; None where ranks differ."""
    sizes = {sum(max(0, min(b, start) - a) for a, b in ranges) for ranges in held}
    return sizes.pop() if len(sizes) == 1 else None
