"""Labels of the dots of a plot: one for dots that lie together, on the side where no other is.

In: dots, and how wide the plot is. Out: labels. What does not overlap at a width does not at
greater ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sitsc.commands.report_axes import number
from sitsc.core.diff.view import spans

_NEAR = 15  # dots so near to each other have one label, in pixels
_LETTER, _LINE, _GAP = 7.2, 14, 4.0
_SIDES = ("right", "left", "above", "below")
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Place:
    """A dot: across in percent, down and its radius in pixels, and its number."""

    x: float
    y: float
    radius: float
    number: int


@dataclass(frozen=True, slots=True)
class Canvas:
    """The size of a plot in pixels."""

    width: float
    height: float

    def pixels(self, dot: Place) -> tuple[float, float]:
        """The middle of a dot."""
        return dot.x * self.width / 100, dot.y

    def near(self, a: Place, b: Place) -> bool:
        """Whether two dots have one label."""
        (ax, ay), (bx, by) = self.pixels(a), self.pixels(b)
        far = max(_NEAR, a.radius + b.radius + _GAP)
        return abs(ax - bx) < far and abs(ay - by) < far

    def box(self, dot: Place) -> Box:
        """What a dot covers."""
        x, y = self.pixels(dot)
        return x - dot.radius, y - dot.radius, x + dot.radius, y + dot.radius


def text_width(text: str) -> float:
    """About the pixels of a label with what is left free beside it."""
    return _LETTER * len(text) + _LINE


def at_right(text: str, y: float, canvas: Canvas) -> Box:
    """What a text covers that ends at the right side of a plot, around `y`."""
    return canvas.width - _LETTER * len(text), y - _LINE / 2, canvas.width, y + _LINE / 2


def across(line: Sequence[float], canvas: Canvas) -> Box:
    """What a level line covers: from and to in percent, and its place down."""
    low, high, y = line
    return low * canvas.width / 100, y - 1, high * canvas.width / 100, y + 1


def place_labels(
    dots: Sequence[Place], canvas: Canvas, others: Sequence[Box] = ()
) -> list[dict[str, str]]:
    """Numbers beside dots: where, from which side, and the text; `others` are covered already."""
    taken = [*(canvas.box(dot) for dot in dots), *others]
    found = []
    for group in _groups(dots, canvas.near):
        text = spans(dot.number for dot in group).replace(" ", ", ")
        made = [_placed(group, side, text, canvas) for side in _SIDES]
        box, label = min(made, key=lambda item: _cost(item[0], taken, canvas))
        taken.append(box)
        found.append(label)
    return found


def _groups(dots: Sequence[Place], near: Callable[[Place, Place], bool]) -> list[list[Place]]:
    """Dots joined with all that are near to one of them."""
    groups: list[list[Place]] = []
    for dot in dots:
        joined = [group for group in groups if any(near(dot, other) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([dot, *(d for g in joined for d in g)], key=lambda d: d.number))
    return sorted(groups, key=lambda group: group[0].number)


def _placed(group: list[Place], side: str, text: str, canvas: Canvas) -> tuple[Box, dict[str, str]]:
    """The box of a label on a side of a group in pixels, and the label."""
    half, wide = _LINE / 2, _LETTER * len(text)
    way = 1 if side in ("right", "below") else -1
    if side in ("right", "left"):
        edge = max(group, key=lambda d: way * canvas.pixels(d)[0] + d.radius)
        x, y = canvas.pixels(edge)
        shift, dy = way * (edge.radius + _GAP), 0.0
        left = x + shift - (0 if side == "right" else wide)
        anchor = "start" if side == "right" else "end"
    else:
        edge = max(group, key=lambda d: way * d.y + d.radius)
        x, y = canvas.pixels(edge)
        shift, dy = 0.0, way * (edge.radius + _GAP + half)
        left, anchor = x - wide / 2, "middle"
    box = (left, y + dy - half, left + wide, y + dy + half)
    at = {"x": number(edge.x), "y": number(edge.y + dy), "dx": number(shift)}
    return box, at | {"anchor": anchor, "text": text}


def _cost(box: Box, taken: list[Box], canvas: Canvas) -> float:
    """The area that a label shares with others, and what of it is outside of the plot."""
    outside = max(0.0, -box[0]) + max(0.0, box[2] - canvas.width)
    outside += max(0.0, -box[1]) + max(0.0, box[3] - canvas.height)
    return outside * _LINE + sum(_shared(box, other) for other in taken)


def _shared(a: Box, b: Box) -> float:
    wide, high = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, wide) * max(0.0, high)
