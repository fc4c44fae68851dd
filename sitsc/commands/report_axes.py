"""Axes of the charts of a report, and which labels fit.

In: values and texts. Out: places across in percent, so that a chart is as wide as the page and its
letters stay as they are; places down in pixels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A chart is at least this wide on each size of page: narrow, middle, wide (see style.css).
WIDTHS = {"n": 290, "m": 620, "w": 880}
_LETTER, _PADDING = 6.9, 10  # of a label, in pixels
_NICE = (1, 2, 5)
_SI = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """A coordinate: two digits behind the point, none that say nothing."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def si(value: float, unit: str) -> str:
    """Three digits with a prefix: 4.54 TB/s."""
    for size, prefix in _SI:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def time_text(us: float) -> str:
    """Microseconds in the unit that reads best."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if abs(us) >= size * 0.9995:
            return f"{us / size:.4g} {unit}"
    return f"{us:.3g} µs"


def share_text(share: float) -> str:
    """A share in percent; of small ones two digits that count, so that none looks like nothing."""
    value = 100 * share
    return f"{value:.1f} %" if value >= 0.1 or not value else f"{value:.2g} %"


@dataclass(frozen=True, slots=True)
class Tick:
    """A line of the grid: its place, its text."""

    at: str
    text: str
    place: float


@dataclass(frozen=True, slots=True)
class Log:
    """A logarithmic axis from `low` to `high` over `length` (100 for percent)."""

    low: float
    high: float
    length: float
    down: bool = False

    def at(self, value: float) -> float:
        """The place of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.length * (1 - share if self.down else share)

    def ticks(self, text: Callable[[float], str], most: int = 6) -> list[Tick]:
        """Powers of ten, more between them where there are few, fewer where there are many."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        powers = range(first, last + 1)
        found = [10.0**p for p in powers if self.low <= 10.0**p <= self.high]
        if len(found) < 3:
            found = [n * 10.0**p for p in powers for n in _NICE]
            found = [v for v in found if self.low <= v <= self.high]
        found = found[:: max(1, math.ceil(len(found) / most))]
        return [Tick(number(self.at(v)), text(v), self.at(v)) for v in found]


@dataclass(frozen=True, slots=True)
class Linear:
    """An axis from 0 to `high` over `length`, in steps of 1, 2 or 5."""

    high: float
    length: float

    def at(self, value: float) -> float:
        """The place of a value."""
        return self.length * value / self.high if self.high else 0.0

    def ticks(self, text: Callable[[float], str], most: int = 5) -> list[Tick]:
        """From 0 on, at most `most` steps; `text` tells a value."""
        if self.high <= 0:
            return []
        size = 10.0 ** math.floor(math.log10(self.high / most))
        nice = next(n * size for n in (*_NICE, 10) if n * size * most >= self.high)
        values = [i * nice for i in range(int(self.high / nice + 1e-9) + 1)]
        return [Tick(number(self.at(v)), text(v), self.at(v)) for v in values]


@dataclass(frozen=True, slots=True)
class Label:
    """A text and the sizes of pages on which it fits, as classes."""

    text: str
    on: str


def labels(texts: Sequence[str], percent: float) -> list[Label]:
    """For each size of page the first text that fits into so many percent of a chart."""
    chosen: dict[str, list[str]] = {}
    for size, width in WIDTHS.items():
        room = width * percent / 100
        fits = [t for t in texts if _LETTER * len(t) + _PADDING <= room]
        if fits:
            chosen.setdefault(fits[0], []).append(size)
    return [Label(text, " ".join(sizes)) for text, sizes in chosen.items()]


def short(name: str) -> list[str]:
    """A name, and its last part: "mlp.down_proj" and "down_proj"."""
    return list(dict.fromkeys((name, name.rpartition(".")[2])))
