"""Residuals: what a plan predicted of what was measured, at the sizes that it was measured at.

In: a plan and an `Actual`. Out: predicted and measured side by side, end to end, memory, and by
kernel class. Part of the pipeline: predictions at other sizes than a bucket's need its cost model.
"""

from dataclasses import dataclass

from sitsc.core.actual import START, TPOT, Actual, Measured, MeasuredKernels, read_actual
from sitsc.core.errors import PlanError
from sitsc.core.plan import Plan, Regime
from sitsc.passes.plan_time import (
    PlanTime,
    decode_seconds,
    launch_seconds,
    plan_time,
    prompt_seconds,
)

__all__ = ["Line", "Residuals", "check_measured", "predicted_ms", "read_actual", "residuals"]

_ATTENTION = "attention_decode"  # the class whose time follows the context


@dataclass(frozen=True, slots=True)
class Line:
    """One figure: `bar` is the relative error bar that the plan gave, 0 where it gave none."""

    name: str
    unit: str
    predicted: float
    measured: float
    bar: float = 0.0

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1 if self.measured else 0.0

    @property
    def outside(self) -> bool:
        """Whether it is further off than the plan said."""
        return bool(self.bar) and abs(self.error) > self.bar


@dataclass(frozen=True, slots=True)
class Residuals:
    """End to end, memory, and kernel classes by the row at which they were measured."""

    ends: tuple[Line, ...]
    memory: tuple[Line, ...]
    kernels: dict[str, tuple[Line, ...]]


def residuals(plan: Plan, actual: Actual) -> Residuals:
    """Predictions beside measurements.

    Raises PlanError for those of a plan that runs otherwise, or of more sequences than it has.
    """
    check_measured(plan, actual)
    time, launch = plan_time(plan), launch_seconds(plan)
    regimes = plan.of_rank(0).regimes
    memory = actual.memory
    return Residuals(
        tuple(_end(plan, time, point) for point in actual.points),
        (Line("peak", "bytes", plan.memory.total_bytes, memory.peak_bytes),) if memory else (),
        {row.key: _kernels(regimes, row, 1e6 * launch) for row in actual.kernels},
    )


def check_measured(plan: Plan, actual: Actual) -> None:
    """Raises PlanError for measurements of a plan that runs otherwise."""
    if actual.plan != plan.sha256() and not (actual.runs and actual.runs == plan.runs()):
        raise PlanError(
            f"measured of plan {actual.plan[:12]}, this is {plan.sha256()[:12]}",
            hint="bench this artifact, or name its own measurements",
        )


def _end(plan: Plan, time: PlanTime, point: Measured) -> Line:
    if point.kind == START:
        bar = plan.predictions[START]
        rate = plan.target.ceilings["weights_load_bytes_per_s"].value
        unread = plan.memory.weights_bytes - point.weights_bytes
        return Line(point.key, "s", bar.value - unread / rate, point.value, bar.error)
    decode = point.kind == TPOT
    size, kind = (point.sequences, "tpot_decode") if decode else (point.tokens, "ttft_prefill")
    bar = _bar(plan, kind, size)
    return Line(point.key, "ms", predicted_ms(plan, time, point), point.value, bar)


def predicted_ms(plan: Plan, time: PlanTime, point: Measured) -> float:
    """What a plan predicts for a measured TPOT or TTFT, at its sizes."""
    if point.kind == TPOT:
        return 1e3 * decode_seconds(plan, time, point.sequences, point.context)
    return 1e3 * prompt_seconds(plan, time, point.tokens)


def _bar(plan: Plan, kind: str, size: int) -> float:
    """The error bar of the bucket that holds `size`, or of the largest."""
    sizes = {
        int(name.rpartition("_")[2]): p.error
        for name, p in plan.predictions.items()
        if name.rpartition("_")[0] == kind
    }
    fits = [bucket for bucket in sizes if bucket >= size]
    return sizes[min(fits) if fits else max(sizes)] if sizes else 0.0


def _kernels(
    regimes: tuple[Regime, ...], row: MeasuredKernels, launch_us: float
) -> tuple[Line, ...]:
    """Kernel classes of the bucket that the row ran in, the slowest first."""
    fits = [r for r in regimes if r.kind == "decode" and r.sizes["sequences"] >= row.sequences]
    if not fits:
        what = f"kernels of {row.key}: no step of this plan has {row.sequences} sequences"
        raise PlanError(what, hint="bench this artifact")
    regime = min(fits, key=lambda r: r.sizes["sequences"])
    times: dict[str, float] = {}
    for group in regime.groups:
        for launch in group.launches:
            us = launch.predicted_us
            if launch.template == _ATTENTION:
                share = row.sequences * (row.context + 1)
                share /= regime.sizes["sequences"] * (regime.sizes["context"] + 1)
                us = launch_us + (us - launch_us) * share
            name = launch.template or launch.kind
            times[name] = times.get(name, 0.0) + us * max(1, len(group.layers))
    names = sorted(set(times) | set(row.us), key=lambda name: (-row.us.get(name, 0.0), name))
    return tuple(Line(n, "µs", times.get(n, 0.0), row.us.get(n, 0.0)) for n in names)
