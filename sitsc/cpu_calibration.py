"""Fits what kernels reach of a CPU's ceilings to measurements of artifacts: the shares, as data.

In: plans and what was measured of them. Out: a `Calibration`. A plan says what each kernel class
moves and computes at each bucket, so that it can be priced anew with other shares. The model with
most weights shows both: its smallest decode step reads, its middle prompt computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sitsc.actual_pipeline import predicted_ms
from sitsc.calibration_pipeline import halved, scored, start_parameter
from sitsc.core.actual import TPOT, TTFT, Actual, Measured
from sitsc.core.calibration import Calibration, Parameter, Residual
from sitsc.core.errors import OptionError
from sitsc.core.hardware import TargetData
from sitsc.core.plan import KernelRow, Plan, Regime
from sitsc.passes.cost import reached
from sitsc.passes.plan_time import plan_time

_LOWEST, _HIGHEST, _ROUNDS = 0.02, 1.5, 4
_NEAR = 1.001
_UNUSED = ("kernel_seconds", "fill_power", "flops_per_exp", "host_seconds")
Shares = Mapping[str, float]
Kernel = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Known:
    """A measured point and the plan that it is of."""

    model: str
    point: Measured
    plan: Plan
    source: str

    def ms(self, shares: Shares) -> float:
        """What the model says of it."""
        plan = priced(self.plan, shares)
        return predicted_ms(plan, plan_time(plan), self.point)


def calibrate_cpu(data: TargetData, measured: Sequence[tuple[Plan, Actual]]) -> Calibration:
    """The calibration of a CPU by all that is given. Raises OptionError when points are too few.

    Points of earlier calibrations are left out: their plans are not at hand.
    """
    known = [
        _Known(actual.model, point, plan, f"{actual.hardware}, {actual.date}, {plan.sha256()[:12]}")
        for plan, actual in measured
        for point in actual.points
        if point.kind in (TPOT, TTFT)
    ]
    roles = _roles(known)
    shares = {"read_share": 1.0, "matmul_share": 1.0}
    for _ in range(_ROUNDS):
        for name, one in roles.items():
            shares[name] = _fitted(one, shares, name)
    parameters = {name: Parameter(0.0, "1", "nothing of the kind on a CPU") for name in _UNUSED}
    for name, one in roles.items():
        source = f"fitted to {one.point.key} of {one.model}, {one.source}"
        parameters[name] = Parameter(float(f"{shares[name]:.4g}"), "1", source)
    largest = roles["read_share"].model
    parameters |= start_parameter([actual for _, actual in measured], largest, data)
    final = {name: parameters[name].value for name in shares}
    fitted = list(roles.values())
    residuals = tuple(_residual(one, final, one in fitted) for one in known)
    return scored(Calibration(data.target.name, parameters, residuals, 0.0, 0.0), data)


def priced(plan: Plan, shares: Shares) -> Plan:
    """A plan of one or several stages with other shares of its ceilings."""
    stages = tuple(replace(s, regimes=_regimes(plan, s.regimes, shares)) for s in plan.stages)
    return replace(plan, regimes=_regimes(plan, plan.regimes, shares), stages=stages)


def _regimes(plan: Plan, regimes: Sequence[Regime], shares: Shares) -> tuple[Regime, ...]:
    peaks = _peaks(plan, regimes)
    return tuple(_regime(plan, regime, peaks, shares) for regime in regimes)


def _regime(plan: Plan, regime: Regime, peaks: Mapping[Kernel, float], shares: Shares) -> Regime:
    ceilings = plan.target.ceilings
    read = ceilings["read_bytes_per_s"].value * shares["read_share"]
    launch = ceilings["launch_seconds"].value
    rows = []
    for row in regime.kernels:
        computing = row.flops / (peaks[_kernel(row)] * shares["matmul_share"])
        us = 1e6 * (max(row.bytes / read, computing) + row.count * launch)
        rows.append(replace(row, predicted_us=us))
    return replace(regime, kernels=tuple(rows), predicted_us=sum(row.predicted_us for row in rows))


def _peaks(plan: Plan, regimes: Sequence[Regime]) -> dict[Kernel, float]:
    """Operations a second that each kernel class has as its ceiling.

    Seen where a bucket computes longer than it reads; without limit where none does.
    """
    ceilings, found = plan.target.ceilings, {}
    read = ceilings["read_bytes_per_s"].value * reached(plan.target, "read_share")
    for regime in regimes:
        for row in regime.kernels:
            found.setdefault(_kernel(row), float("inf"))
            seconds = 1e-6 * row.predicted_us - row.count * ceilings["launch_seconds"].value
            if row.flops and seconds > _NEAR * row.bytes / read:
                peak = row.flops / seconds / reached(plan.target, "matmul_share")
                found[_kernel(row)] = min(peak, found[_kernel(row)])
    return found


def _kernel(row: KernelRow) -> Kernel:
    return row.name, row.op, row.layer_class


def _roles(known: Sequence[_Known]) -> dict[str, _Known]:
    """The point that shows each share. Raises OptionError where one is missing."""
    most = max((one.plan.memory.weights_bytes for one in known), default=0)
    large = [one for one in known if one.plan.memory.weights_bytes == most]
    steps = [one for one in large if one.point.kind == TPOT]
    prompts = sorted(
        (one for one in large if one.point.kind == TTFT), key=lambda one: one.point.tokens
    )
    if not steps or not prompts:
        what = "a CPU is calibrated by a decode step and a prompt of its largest artifact"
        raise OptionError(what, hint="sitsc bench ART measures both")
    smallest = min(steps, key=lambda one: (one.point.sequences, one.point.context))
    return {"read_share": smallest, "matmul_share": prompts[len(prompts) // 2]}


def _fitted(one: _Known, shares: Shares, name: str) -> float:
    """The share with which a point is as it was measured: more of it takes less time."""
    return halved(
        _LOWEST, _HIGHEST, lambda share: one.ms({**shares, name: share}) <= one.point.value
    )


def _residual(one: _Known, shares: Shares, fitted: bool) -> Residual:
    point = one.point
    return Residual(
        model=one.model,
        point=point.key,
        tokens=point.tokens or point.sequences,
        sequences=point.sequences or 1,
        context=round(point.context),
        measured_ms=point.value,
        predicted_ms=float(f"{one.ms(shares):.5g}"),
        fitted=fitted,
        source=one.source,
    )
