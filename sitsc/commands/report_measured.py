"""Predictions beside measurements in a report: rows of figures, and their errors on one axis.

In: `Measurements`, or the reason why there are none. Out: texts, and places in percent.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sitsc.commands.output import bytes_text, count_text
from sitsc.commands.report_axes import number, si
from sitsc.commands.report_axes import time_text as time
from sitsc.commands.report_roofline import LEAST, Reached
from sitsc.core.plan import Plan
from sitsc.report_pipeline import KernelClass, Line, Measurements, beside, measurements

_LEAST_AXIS = 0.1  # of the errors, to both sides
_NONE = "–"


def find(plan: Plan, place: Path | None, file: Path | None) -> tuple[Measurements | None, str]:
    """What was measured, from `file` or from `place` beside the artifact; else why there is none.

    Raises PlanError for a file that was named and does not belong to the plan.
    """
    if file is not None:
        return measurements(plan, file), ""
    if place is None:
        return None, "Nothing was measured: this is a plan alone, not an artifact."
    return beside(plan, place)


def reached(found: Measurements | None) -> dict[str, list[Reached]]:
    """Measured kernel classes as places in a roofline, by regime, but for the smallest."""
    shown: dict[str, list[Reached]] = {}
    for name, items in ({} if found is None else found.classes).items():
        whole = sum(item.measured_us for item in items)
        counts = [item for item in items if item.measured_us >= LEAST * whole]
        shown[name] = [_reached(item) for item in counts]
    return shown


def _reached(item: KernelClass) -> Reached:
    rate = 1e6 * item.flops / item.measured_us
    lines = (
        f"{item.name}, measured at {item.key}",
        f"{time(item.measured_us)}, predicted {time(item.predicted_us)}",
        f"{bytes_text(item.bytes)}, {count_text(item.flops)}FLOP",
        f"{si(rate, 'FLOP/s')}, {si(1e6 * item.bytes / item.measured_us, 'B/s')}",
    )
    return Reached(item.kind, item.flops / item.bytes, rate, "\n".join(lines))


def measured(found: Measurements | None, why: str) -> dict[str, Any]:
    """What the template shows."""
    if found is None:
        return {"why": why, "tables": [], "about": [], "outside": []}
    actual, residuals = found.actual, found.residuals
    groups = [("end to end", residuals.ends), ("memory of one device", residuals.memory)]
    groups += [(f"kernels of a step, {key}", rows) for key, rows in residuals.kernels.items()]
    most = max((_reach(line) for _, lines in groups for line in lines), default=0.0)
    most = max(_LEAST_AXIS, most)
    about = [("model", actual.model), ("hardware", actual.hardware), ("date", actual.date)]
    about += [("commit", actual.commit[:12])] if actual.commit else []
    versions = (f"{name} {version}" for name, version in sorted(actual.versions.items()))
    about += [("versions", ", ".join(versions))]
    return {
        "why": "",
        "about": about,
        "tables": [
            {"title": title, "rows": [_row(line, most) for line in lines]}
            for title, lines in groups
            if lines
        ],
        "most": f"{100 * most:.0f} %",
        "outside": [line.name for line in residuals.ends if line.outside],
        "kernels": bool(residuals.kernels),
    }


def _missing(line: Line) -> bool:
    return not line.predicted or not line.measured


def _reach(line: Line) -> float:
    """How far from the middle a row is drawn."""
    return line.bar if _missing(line) else max(line.bar, min(1.0, abs(line.error)))


def _row(line: Line, most: float) -> dict[str, Any]:
    missing = _missing(line)
    shown = max(-most, min(most, line.error))
    return {
        "name": line.name,
        "predicted": _figure(line.predicted, line.unit),
        "measured": _figure(line.measured, line.unit),
        "error": _NONE if missing else f"{100 * line.error:+.1f} %",
        "bar": f"± {100 * line.bar:.1f} %" if line.bar else "",
        "outside": line.outside,
        "missing": missing,
        "at": number(50 + 50 * shown / most),
        "low": number(50 - 50 * line.bar / most),
        "wide": number(100 * line.bar / most),
    }


def _figure(value: float, unit: str) -> str:
    if not value:
        return _NONE
    return bytes_text(value) if unit == "bytes" else f"{value:.4g} {unit}"


def figures(plan: Plan) -> Sequence[tuple[str, str, str]]:
    """The predictions of a plan: name, value and error bar."""
    return [
        (name, f"{item.value:.4g} {item.unit}", f"± {100 * item.error:.3g} %")
        for name, item in plan.predictions.items()
    ]
