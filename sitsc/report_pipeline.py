"""What a report says of measurements: residuals, and how near measured kernels come to ceilings.

In: a plan and where its measurements may lie. Out: `Measurements`, or the reason why there are
none. Part of the pipeline: residuals need the cost model.
"""

from dataclasses import dataclass
from pathlib import Path

from sitsc.actual_pipeline import Line, Residuals, read_actual, residuals
from sitsc.core.actual import Actual, MeasuredKernels
from sitsc.core.diff.view import programs
from sitsc.core.errors import PlanError
from sitsc.core.plan import Plan, Regime
from sitsc.core.report.kinds import kind_of_class

__all__ = ["KernelClass", "Line", "Measurements", "beside", "measurements"]

_ATTENTION = "attention_decode"  # the class whose work follows the context


@dataclass(frozen=True, slots=True)
class KernelClass:
    """A kernel class that was measured in one row: its work, and both times in µs."""

    name: str
    kind: str
    key: str
    bytes: float
    flops: float
    predicted_us: float
    measured_us: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """What was measured of a plan; `classes` by the name of the regime that ran."""

    actual: Actual
    residuals: Residuals
    classes: dict[str, tuple[KernelClass, ...]]


def measurements(plan: Plan, file: Path) -> Measurements:
    """Predictions beside the measurements of a file. Raises PlanError for those of another plan."""
    actual = read_actual(file)
    found = residuals(plan, actual)
    classes: dict[str, tuple[KernelClass, ...]] = {}
    for row in actual.kernels:
        regime = _regime(plan, row)
        made = _classes(regime, row, found.kernels[row.key])
        classes[regime.name] = (*classes.get(regime.name, ()), *made)
    return Measurements(actual, found, classes)


def beside(plan: Plan, file: Path) -> tuple[Measurements | None, str]:
    """What lies beside an artifact, or None and the reason, in a sentence."""
    if not file.is_file():
        return None, f"Nothing was measured: there is no {file.name} beside the artifact."
    try:
        return measurements(plan, file), ""
    except PlanError as error:
        return None, f"{file.name} is not shown: {error.what}."


def _regime(plan: Plan, row: MeasuredKernels) -> Regime:
    """The decode bucket that a row ran in."""
    regimes = [r for r in programs(plan)[0].regimes if r.kind == "decode"]
    fits = [r for r in regimes if r.sizes["sequences"] >= row.sequences]
    return min(fits, key=lambda r: r.sizes["sequences"])


def _classes(
    regime: Regime, row: MeasuredKernels, lines: tuple[Line, ...]
) -> tuple[KernelClass, ...]:
    """Classes that were measured and have work, with the work at the measured context."""
    work = {line.name: (0.0, 0.0) for line in lines}
    share = row.sequences * (row.context + 1)
    share /= regime.sizes["sequences"] * (regime.sizes["context"] + 1)
    for group in regime.groups:
        for launch in group.launches:
            name, times = launch.template or launch.kind, max(1, len(group.layers))
            times *= share if launch.template == _ATTENTION else 1
            moved, computed = work[name]
            work[name] = moved + times * launch.bytes, computed + times * launch.flops
    return tuple(
        KernelClass(
            *(line.name, kind_of_class(line.name), row.key),
            *(*work[line.name], line.predicted, line.measured),
        )
        for line in lines
        if line.measured and all(work[line.name])
    )
