"""Predictions beside measurements, for people and for programs."""

from collections.abc import Sequence
from typing import Any

from sitsc.actual_pipeline import Line, Residuals
from sitsc.commands.output import bytes_text, table_lines
from sitsc.core.actual import Actual
from sitsc.core.records import to_value

_NONE = "–"


def actual_lines(actual: Actual, found: Residuals) -> list[str]:
    """Where and when it was measured, then end to end, memory and kernel classes."""
    commit = f", commit {actual.commit[:12]}" if actual.commit else ""
    lines = [f"measured  {actual.model} on {actual.hardware}, {actual.date}{commit}"]
    if found.ends:
        lines += ["", *_table("end to end", found.ends)]
    if found.memory:
        lines += ["", *_table("memory of one device", found.memory)]
    for key, rows in found.kernels.items():
        lines += ["", *_table(f"kernels of a step, {key}", rows, whole=True)]
    if not found.kernels:
        lines += ["", "kernel classes were not measured (sitsc bench --kernels, on a GPU)"]
    outside = [line.name for line in found.ends if line.outside]
    if outside:
        lines += ["", f"further off than the plan said: {', '.join(outside)}"]
    return lines


def actual_value(actual: Actual, found: Residuals) -> dict[str, Any]:
    """The same as one JSON value."""
    return {
        "actual": to_value(actual),
        "end_to_end": [_value(line) for line in found.ends],
        "memory": [_value(line) for line in found.memory],
        "kernels": {key: [_value(line) for line in rows] for key, rows in found.kernels.items()},
    }


def _value(line: Line) -> dict[str, Any]:
    return to_value(line) | {"error": line.error, "outside": line.outside}


def _table(title: str, lines: Sequence[Line], *, whole: bool = False) -> list[str]:
    rows = [_row(line) for line in lines]
    if whole:
        sums = (sum(getattr(line, name) for line in lines) for name in ("predicted", "measured"))
        rows.append(_row(Line("together", lines[0].unit if lines else "µs", *sums)))
    return table_lines([(title, "predicted", "measured", "error", "bar"), *rows])


def _row(line: Line) -> tuple[str, ...]:
    missing = not line.predicted or not line.measured
    return (
        line.name,
        _figure(line.predicted, line.unit),
        _figure(line.measured, line.unit),
        _NONE if missing else f"{100 * line.error:+.1f} %",
        f"± {100 * line.bar:.1f} %" if line.bar else "",
    )


def _figure(value: float, unit: str) -> str:
    if not value:
        return _NONE
    return bytes_text(value) if unit == "bytes" else f"{value:.4g} {unit}"
