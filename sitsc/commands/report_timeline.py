"""The timeline of a report: a whole step by layers, then each group of launches at its own scale.

In: a plan and the name of a regime. Out: lanes of bars, places in percent.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sitsc.commands.output import bytes_text, count_text
from sitsc.commands.report_axes import Label, Linear, labels, number, share_text, short
from sitsc.commands.report_axes import time_text as time
from sitsc.core.diff.view import spans
from sitsc.core.plan import Plan
from sitsc.core.report.kinds import KINDS
from sitsc.core.report.steps import Block, Lane, Segment, lane_title, lanes

_WAITS = "host"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: from `x` on, `width` wide, in percent; `tip` says all of it."""

    x: str
    width: str
    kind: str
    tip: str
    labels: tuple[Label, ...] = ()


@dataclass(frozen=True, slots=True)
class Track:
    """A row of bars under a title."""

    title: str
    note: str
    bars: tuple[Bar, ...]
    rows: tuple[tuple[str, ...], ...] = ()


def timeline(plan: Plan, name: str) -> dict[str, Any]:
    """What the template shows of a regime."""
    found = lanes(plan, name)
    end = max(lane.start_us + lane.step_us for lane in found)
    axis = Linear(end, 100.0)
    return {
        "whole": [Track(lane_title(plan, lane), *_whole(lane, axis)) for lane in found],
        "ticks": axis.ticks(_tick, most=4),
        "parts": list(_parts(found)),
        "kinds": _kinds(found),
        "waits": any(lane.waits_us for lane in found),
        "packaged": any(lane.packaged for lane in found),
        "stages": len(found),
        "total": time(sum(lane.step_us for lane in found)),
    }


def _tick(us: float) -> str:
    return time(us) if us else "0"


def _kinds(found: tuple[Lane, ...]) -> list[tuple[str, str]]:
    """Kinds of work with their share of all launches."""
    us = dict.fromkeys(KINDS, 0.0)
    for lane in found:
        for block in lane.blocks:
            for segment in block.segments:
                us[segment.kind] += segment.us * block.times
    whole = sum(us.values()) or 1.0
    return [(kind, share_text(value / whole)) for kind, value in us.items() if value]


def _whole(lane: Lane, axis: Linear) -> tuple[str, tuple[Bar, ...]]:
    """A note and the bars of a lane: neighbours of one kind are one bar."""
    bars, at = [], lane.start_us
    for block in lane.blocks:
        names = [f"layer {layer}" for layer in block.layers] or [block.name]
        for name in names:
            for kind, run in groupby(block.segments, key=lambda segment: segment.kind):
                same = list(run)
                us = sum(segment.us for segment in same)
                tip = f"{name}: {kind}, {time(us)}\n{_names(same)}"
                bars.append(Bar(_x(axis, at), _x(axis, us), kind, tip))
                at += us
    launched = f"{time(lane.us)} in kernels"
    if lane.waits_us:
        tip = f"the host launches for longer than kernels run\n{time(lane.waits_us)} more"
        bars.append(Bar(_x(axis, at), _x(axis, lane.waits_us), _WAITS, tip))
        launched += f", {time(lane.step_us)} with the host's launching"
    return launched, tuple(bars)


def _x(axis: Linear, us: float) -> str:
    return f"{axis.at(us):.3f}"


def _names(segments: list[Segment]) -> str:
    return ", ".join(dict.fromkeys(segment.name for segment in segments))


def _parts(found: tuple[Lane, ...]) -> Iterator[Track]:
    """Each group of launches once, over its own width; what stages have alike is joined."""
    seen: dict[tuple[str, tuple[Segment, ...]], list[int]] = {}
    for lane in found:
        for block in lane.blocks:
            where = seen.setdefault((block.name, block.segments), [])
            where += block.layers
    for (name, segments), layers in seen.items():
        block = Block(name, tuple(layers), segments)
        if block.each_us:
            yield _part(block)


def _part(block: Block) -> Track:
    axis, at, bars = Linear(block.each_us, 100.0), 0.0, []
    for segment in block.segments:
        wide = axis.at(segment.us)
        texts = [f"{t} {time(segment.us)}" for t in short(segment.name)] + short(segment.name)
        fits = tuple(labels(texts, wide))
        bars.append(Bar(_x(axis, at), number(wide), segment.kind, _tip(segment, block), fits))
        at += segment.us
    title, note = block.name, time(block.us)
    if block.layers:
        many = "layers" if len(block.layers) > 1 else "layer"
        title = f"{block.name}, {many} {spans(block.layers).replace(' ', ', ')}"
    if block.times > 1:
        note = f"{time(block.each_us)} each, {time(block.us)} in all {block.times}"
    return Track(title, note, tuple(bars), tuple(map(_row, block.segments)))


def _row(segment: Segment) -> tuple[str, ...]:
    computed = count_text(segment.flops) if segment.flops else "0"
    sizes = (bytes_text(segment.bytes), computed, time(segment.us))
    return segment.name, segment.what, segment.tile, *sizes


def _tip(segment: Segment, block: Block) -> str:
    lines = [segment.name, segment.what if segment.what != segment.name else ""]
    lines += [f"{time(segment.us)}, {share_text(segment.us / block.each_us)} of this part"]
    if segment.bytes or segment.flops:
        lines += [f"{bytes_text(segment.bytes)}, {count_text(segment.flops)}FLOP"]
    lines += [segment.tile]
    lines += [f"{segment.count} calls" if segment.count > 1 else ""]
    return "\n".join(line for line in lines if line)
