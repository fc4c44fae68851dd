"""The memory of a report: parts of each device as bars, buffers of the arena by place and lifetime.

In: a plan and the name of a regime. Out: boxes, across in percent and down in pixels.
"""

from collections.abc import Sequence
from typing import Any

from sitsc.commands.output import bytes_text
from sitsc.commands.report_axes import Label, Linear, labels, number, share_text
from sitsc.commands.report_timeline import Bar
from sitsc.core.diff.view import spans
from sitsc.core.plan import ArenaBuffer, Plan
from sitsc.core.report.memory_map import FREE, Device, Part, arena, devices

HEIGHT = 320  # of the plot of the arena
_LABEL_HEIGHT = 15
_LEAST = 1.0  # a buffer is at least so high
_LITTLE = 0.5  # of a device: less is drawn over its own width too
_MANY = 12  # rows of the table of the largest


def device_rows(plan: Plan) -> list[dict[str, Any]]:
    """Bars and a table of each device that is not like another."""
    alike: dict[tuple[Part, ...], list[Device]] = {}
    for device in devices(plan):
        alike.setdefault(device.parts, []).append(device)
    return [_device(plan, group) for group in alike.values()]


def _device(plan: Plan, group: list[Device]) -> dict[str, Any]:
    device, stages = group[0], spans(device.stage for device in group).replace(" ", ", ")
    word = "stages" if len(group) > 1 else "stage"
    title = f"a rank of {word} {stages}" if plan.stages else "one device"
    bars = [("all of it", _bars(device.parts, device.all_bytes))]
    if device.total_bytes < _LITTLE * device.all_bytes:
        planned = tuple(part for part in device.parts if part.name != FREE)
        bars.append(("what is planned", _bars(planned, device.total_bytes)))
    return {"title": title, "bars": bars, "parts": _parts(device)}


def _bars(parts: Sequence[Part], all_bytes: int) -> list[Bar]:
    axis, at, bars = Linear(all_bytes, 100.0), 0, []
    for part in parts:
        wide = axis.at(part.bytes)
        lines = [part.name, f"{bytes_text(part.bytes)}, {share_text(part.bytes / all_bytes)}"]
        tip = "\n".join(line for line in (*lines, part.place, part.method) if line)
        texts = [f"{part.name} {bytes_text(part.bytes)}", part.name]
        x = f"{axis.at(at):.3f}"
        bars.append(Bar(x, f"{wide:.3f}", part.name, tip, tuple(labels(texts, wide))))
        at += part.bytes
    return bars


def _parts(device: Device) -> list[tuple[str, str, str, str, str]]:
    rows = []
    for part in device.parts:
        where = ": ".join(text for text in (part.place, part.method) if text)
        share = share_text(part.bytes / device.all_bytes)
        rows.append((part.name, where, bytes_text(part.bytes), str(part.bytes), share))
    planned = share_text(device.total_bytes / device.all_bytes)
    total = ("planned", "", bytes_text(device.total_bytes), str(device.total_bytes), planned)
    at = len(rows) - (device.parts[-1].name == FREE)
    return [*rows[:at], total, *rows[at:]]


def arena_plot(plan: Plan, regime: str, stage: int) -> dict[str, Any]:
    """Boxes of the arena of a stage: buffers that are kept over the whole width."""
    found = arena(plan, regime, stage)
    down, across = Linear(found.end, HEIGHT), Linear(found.steps, 100.0)
    boxes = [_box(b, down, 0.0, 100.0, "kept for all steps") for b in found.kept]
    for buffer in found.moving:
        low, high = across.at(buffer.first), across.at(buffer.last + 1)
        life = f"steps {buffer.first} to {buffer.last} of {found.steps}"
        boxes.append(_box(buffer, down, low, high - low, life, regime))
    largest = sorted((*found.kept, *found.moving), key=lambda b: (-b.bytes, b.offset, b.name))
    return {
        "height": HEIGHT,
        "boxes": boxes,
        "ticks": down.ticks(_tick),
        "spans": [
            {
                "x": number(across.at(s.low)),
                "width": number(across.at(s.high - s.low)),
                "labels": labels((f"{s.name} × {s.times}", s.name), across.at(s.high - s.low)),
                "tip": f"{s.name}: launches {s.low} to {s.high - 1}, once a layer of {s.times}",
            }
            for s in found.spans
        ],
        "steps": found.steps,
        "kept": len(found.kept),
        "moving": len(found.moving),
        "end": bytes_text(found.end),
        "largest": [_row(b, regime) for b in largest[:_MANY]],
        "more": max(0, len(largest) - _MANY),
    }


def _tick(size: float) -> str:
    return bytes_text(size).replace(".0 ", " ") if size else "0"


def _name(buffer: ArenaBuffer, regime: str) -> str:
    return buffer.name.removeprefix(f"{regime}/")


def _row(buffer: ArenaBuffer, regime: str) -> tuple[str, ...]:
    shape = f"{buffer.dtype} [{', '.join(map(str, buffer.shape))}]"
    life = f"{buffer.first}-{buffer.last}" if "/" in buffer.name or buffer.last else "always"
    size = bytes_text(buffer.bytes)
    return _name(buffer, regime), shape, size, str(buffer.offset), life


def _box(
    buffer: ArenaBuffer, down: Linear, x: float, width: float, life: str, regime: str = ""
) -> dict[str, Any]:
    name, height = _name(buffer, regime), down.at(buffer.bytes)
    high = max(height, _LEAST)
    texts = (f"{name} {bytes_text(buffer.bytes)}", name)
    fits: list[Label] = labels(texts, width) if high >= _LABEL_HEIGHT else []
    lines = (name, f"{bytes_text(buffer.bytes)} at offset {buffer.offset}", life)
    return {
        "x": number(x),
        "width": number(width),
        "y": number(down.at(buffer.offset)),
        "height": number(high),
        "middle": number(high / 2),
        "kind": "moving" if regime else "kept",
        "tip": "\n".join(lines),
        "labels": fits,
    }
