"""The roofline of a report: axes, ceilings, a dot a kernel class, and the table beside it.

In: a plan, names of regimes, and what was measured of kernel classes. Out: for each regime the
places of dots and texts, across in percent and down in pixels; all regimes share the axes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sitsc.commands.output import bytes_text, count_text
from sitsc.commands.report_axes import WIDTHS, Log, number, share_text, si
from sitsc.commands.report_axes import time_text as time
from sitsc.commands.report_labels import Canvas, Place, across, at_right, place_labels, text_width
from sitsc.core.plan import Plan
from sitsc.core.report.roofline import Point, Roof, points, roof

HEIGHT = 380
_LINE, _OFF = 14, 18  # pixels from a label to the next, and to its line: dots lie on it
_RATE = "FLOP/s"
_ROOM, _BEYOND = 2.0, 10.0  # axes go so many times further than what is shown, and than the ridge
_ALONG = (0.5, 0.6, 0.7, 0.8)  # of the slope, where its label may be
LEAST = 5e-3  # of a step: what takes less does not stretch the axes and stands in the table


@dataclass(frozen=True, slots=True)
class Dot:
    """A place in the plot with what is known of it; `reached` when it was measured."""

    x: float
    y: float
    radius: float
    kind: str
    tip: str
    number: int
    reached: bool = False


@dataclass(frozen=True, slots=True)
class Reached:
    """A kernel class that was measured: FLOP/byte, FLOP/s, and its line for people."""

    kind: str
    intensity: float
    flops_per_s: float
    tip: str


def roofline(
    plan: Plan, names: Sequence[str], measured: dict[str, list[Reached]]
) -> dict[str, Any] | None:
    """What the template shows; None where the plan has no ceilings."""
    found = roof(plan)
    if found is None:
        return None
    classes = {name: points(plan, name) for name in names}
    places = [(p.intensity, p.flops_per_s) for ps in classes.values() for p in _placed_of(ps)]
    places += [(r.intensity, r.flops_per_s) for rs in measured.values() for r in rs]
    low, high = _range([found.ridge, *(x for x, _ in places)])
    right = Log(low, max(high, _BEYOND * found.ridge), 100.0)
    down = Log(*_range([found.peak, *(y for _, y in places)]), HEIGHT, down=True)
    lines = list(_ceilings(found, right, down))
    return {
        "height": HEIGHT,
        "x_ticks": right.ticks("{:g}".format),
        "y_ticks": down.ticks(lambda rate: si(rate, "").strip()),
        "ceilings": lines,
        "ridge": f"{found.ridge:.3g}",
        "dtype": found.dtype,
        "read": si(found.read, "B/s"),
        "regimes": [
            _regime(name, classes[name], measured.get(name, []), found, right, down, lines)
            for name in names
        ],
    }


def _placed_of(classes: list[Point]) -> list[Point]:
    """What has a dot: of the classes with bytes and FLOPs those that take a part of the step."""
    whole = sum(point.us for point in classes)
    return [point for point in classes if point.placed and point.us >= LEAST * whole]


def _range(values: list[float]) -> tuple[float, float]:
    return min(values) / _ROOM, max(values) * _ROOM


def _ceilings(found: Roof, right: Log, down: Log) -> Iterator[dict[str, str]]:
    """Lines: the slope of the memory up to the ridge, then the peaks of dtypes up to the plan's."""
    low, high = max(right.low, down.low / found.read), found.ridge
    slope = {"x1": low, "y1": low * found.read, "x2": high, "y2": found.peak}
    line = _line(slope, right, down, f"memory {si(found.read, 'B/s')}", "memory")
    yield line | _beside_slope(line)
    under = 0.0
    for dtype, peak in sorted(found.peaks.items(), key=lambda item: -item[1]):
        if not down.low < peak <= found.peak or dtype not in found.dtypes:
            continue
        under = max(under + _LINE, down.at(peak) + _OFF)
        ridge = max(peak / found.read, right.low)
        ends = {"x1": ridge, "y1": peak, "x2": right.high, "y2": peak}
        kind = "main" if dtype == found.dtype else "other"
        line = _line(ends, right, down, f"{dtype} {si(peak, _RATE)}", kind)
        at = down.at(peak) - _OFF if kind == "main" else under
        yield line | {"label_y": number(at)}


def _line(ends: dict[str, float], right: Log, down: Log, text: str, kind: str) -> dict[str, str]:
    x = {key: number(right.at(ends[key])) for key in ("x1", "x2")}
    y = {key: number(down.at(ends[key])) for key in ("y1", "y2")}
    return x | y | {"text": text, "kind": kind}


def _beside_slope(line: dict[str, str]) -> dict[str, str]:
    """Where the slope's label ends: left of it, where there is room; else it begins at the left."""
    x1, x2, y1, y2 = (float(line[key]) for key in ("x1", "x2", "y1", "y2"))
    for share in _ALONG:
        x, y = x1 + share * (x2 - x1), y1 + share * (y2 - y1)
        if x * WIDTHS["n"] / 100 > text_width(line["text"]):
            return {"x": number(x), "dx": "-10", "y": number(y - 4), "anchor": "end"}
    return {"x": "0", "dx": "4", "y": number(y2 - _OFF), "anchor": "start"}


def _regime(
    name: str,
    classes: list[Point],
    measured: list[Reached],
    found: Roof,
    right: Log,
    down: Log,
    lines: list[dict[str, str]],
) -> dict[str, Any]:
    shown = [point for point in classes if point.us]
    whole, placed = sum(point.us for point in shown) or 1.0, _placed_of(shown)
    dots = []
    for index, point in enumerate(shown, 1):
        if point in placed:
            radius = 4 + 8 * (point.us / whole) ** 0.5
            place = right.at(point.intensity), down.at(point.flops_per_s)
            tip = f"{index}  {point.name}\n{_tip(point, found, whole)}"
            dots.append(Dot(*place, radius, point.kind, tip, index))
    rings = [
        Dot(right.at(m.intensity), down.at(m.flops_per_s), 6, m.kind, m.tip, 0, reached=True)
        for m in measured
    ]
    return {
        "name": name,
        "dots": [_dot(dot) for dot in (*dots, *rings)],
        "labels": _labels(dots, lines),
        "rows": [_row(index, point, found, whole) for index, point in enumerate(shown, 1)],
        "inside": [f"{p.name} {p.op}" for p in classes if not p.us],
        "least": share_text(LEAST),
        "unplaced": [index for index, point in enumerate(shown, 1) if point not in placed],
        "measured": bool(measured),
        "kinds": list(dict.fromkeys(point.kind for point in placed)),
    }


def _dot(dot: Dot) -> dict[str, Any]:
    place = {"x": number(dot.x), "y": number(dot.y), "r": number(dot.radius)}
    return place | {"kind": dot.kind, "tip": dot.tip, "reached": dot.reached}


def _labels(dots: list[Dot], lines: list[dict[str, str]]) -> list[dict[str, str]]:
    """Labels for narrow pages, and for wide ones, where dots lie further apart."""
    places = [Place(dot.x, dot.y, dot.radius, dot.number) for dot in dots]
    level = [line for line in lines if "label_y" in line]
    found = []
    for sizes, width in (("n m", WIDTHS["n"]), ("w", WIDTHS["w"])):
        canvas = Canvas(width, HEIGHT)
        covered = [at_right(line["text"], float(line["label_y"]), canvas) for line in level]
        for line in level:
            covered.append(across([float(line[key]) for key in ("x1", "x2", "y1")], canvas))
        found += [label | {"on": sizes} for label in place_labels(places, canvas, covered)]
    return found


def _tip(point: Point, found: Roof, whole: float) -> str:
    lines = [
        f"{point.op} by {point.by}",
        f"{time(point.us)}, {share_text(point.us / whole)} of the step, {point.count} calls",
        f"{point.intensity:.3g} FLOP/byte, {si(point.flops_per_s, _RATE)},"
        f" {si(point.bytes_per_s, 'B/s')}",
        f"limited by {found.limit(point.intensity)}, {share_text(found.share(point))} of the"
        " ceiling",
    ]
    return "\n".join(lines)


def _row(index: int, point: Point, found: Roof, whole: float) -> dict[str, Any]:
    share = found.share(point)
    return {
        "number": index,
        "kind": point.kind,
        "name": point.name,
        "op": point.op,
        "by": point.by,
        "cells": (
            str(point.count),
            bytes_text(point.bytes),
            count_text(point.flops),
            f"{point.intensity:.3g}",
            si(point.flops_per_s, _RATE) if point.flops else "–",
            si(point.bytes_per_s, "B/s"),
            found.limit(point.intensity),
            share_text(share),
            time(point.us),
            share_text(point.us / whole),
        ),
        "share": number(100 * point.us / whole),
    }
