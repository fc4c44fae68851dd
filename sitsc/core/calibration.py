"""Calibration: how far kernels of a target stay below its ceilings, from measurements.

In: data/calibration/<target>.json, which `sitsc plan calibrate` writes from results, and
data/residuals/<target>.json, which `python -m bench.partition` writes: how far predictions of
several ranks were off. Out: a `Calibration` with what it was fitted on and how far it was off
elsewhere; error bars. Types no number by hand.
"""

import json
import statistics
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from sitsc.core.errors import PlanError
from sitsc.core.hardware import TargetData
from sitsc.core.records import from_value, to_value

REFERENCE = "h200"  # the target whose shares stand for GPUs that nobody has measured


@dataclass(frozen=True, slots=True)
class Parameter:
    """One fitted or known number and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Residual:
    """One measured point and what the model says of it; `fitted` when it was used to fit.

    `tokens` are the new tokens of the step, of `sequences` with `context` tokens each before them.
    """

    model: str
    point: str
    tokens: int
    sequences: int
    context: int
    measured_ms: float
    predicted_ms: float
    fitted: bool
    source: str

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True, slots=True)
class RankResidual:
    """One measured point of several ranks, none of which is ever fitted to."""

    model: str
    point: str
    tp: int
    pp: int
    measured_ms: float
    predicted_ms: float
    source: str

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ms / self.measured_ms - 1

    @property
    def bar(self) -> float:
        """The error bar of the prediction that just holds what was measured."""
        return abs(self.measured_ms / self.predicted_ms - 1)


@dataclass(frozen=True, slots=True)
class RankResiduals:
    """What was measured of partitions of a target, beside what is predicted."""

    target: str
    residuals: tuple[RankResidual, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Shares of the ceilings, by name, and the residuals behind them.

    `parameters` holds kernel_seconds (of a kernel in a step, beyond the gap between two),
    read_share (of the read ceiling, kernels on tensor cores), fill_power (of the share of
    multiprocessors that tiles of a library product keep busy), matmul_share (of the matmul
    ceiling), host_seconds (the host's, to launch a kernel outside of a graph), flops_per_exp
    (matmul operations in the time of one exponential) and start_seconds (of a start, without
    reading weights).
    """

    target: str
    parameters: dict[str, Parameter]
    residuals: tuple[Residual, ...]
    median_error: float
    worst_error: float

    def errors(self, kind: str) -> tuple[float, ...]:
        """Sizes of the residuals of "tpot", "ttft" or "start" that were not fitted."""
        found = (r for r in self.residuals if not r.fitted and _is(kind, r.point))
        return tuple(abs(r.error) for r in found)

    def value(self, name: str) -> float:
        """One parameter."""
        return self.parameters[name].value


def _is(kind: str, point: str) -> bool:
    """Whether a point is one of "tpot", "ttft" or "start"."""
    return point.removeprefix("serve_").startswith({"tpot": "bs"}.get(kind, kind))


def calibration_file(target: str) -> Path:
    """Where the calibration of a target lies."""
    return Path(str(resources.files("sitsc").joinpath(f"data/calibration/{target}.json")))


def calibration_text(made: Calibration) -> str:
    """The text of a calibration file."""
    return json.dumps(to_value(made), indent=1) + "\n"


def calibrated() -> list[str]:
    """Targets with a calibration of their own."""
    folder = resources.files("sitsc").joinpath("data/calibration")
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".json"))


def calibration_for(data: TargetData) -> Calibration | None:
    """The shares that hold for a target: its own, for other GPUs those of the reference."""
    own = load_calibration(data.target.name)
    return load_calibration(REFERENCE) if own is None and data.cuda is not None else own


def measured_error(data: TargetData, kind: str, tp: int = 1, pp: int = 1) -> float:
    """The worst residual of "tpot" or "ttft" that was not fitted; what the file says without.

    Of several ranks also of those that were measured with the cuts that it has: TP, PP, or both.
    They hold what was measured, links and all; for a GPU without them they are the reference's.
    """
    own = load_calibration(data.target.name)
    errors = () if own is None else own.errors(kind)
    alone = float(f"{max(errors):.3g}") if errors else data.prediction_error
    if tp * pp == 1 or (found := calibration_for(data)) is None:
        return alone
    several = rank_residuals(found.target)
    if not several and data.cuda is not None:
        several = rank_residuals(REFERENCE)
    bars = [
        r.bar
        for r in several
        if _is(kind, r.point) and (r.tp == 1 or tp > 1) and (r.pp == 1 or pp > 1)
    ]
    return max([alone, *(float(f"{bar:.3g}") for bar in bars)])


def residuals_text(made: Calibration) -> str:
    """ "median residual 3.2 %, worst 14.8 % (TP 2, bs32_ctx1024 of m)": of all that was not fitted.

    Shares of what was measured; several ranks count as one does.
    """
    alone = [(r.error, f"{r.point} of {r.model}") for r in made.residuals if not r.fitted]
    several = [
        (r.error, ", ".join([*_cuts(r), f"{r.point} of {r.model}"]))
        for r in rank_residuals(made.target)
    ]
    errors = {where: abs(error) for error, where in (*several, *alone)}
    if not errors:
        return "nothing was measured that was not fitted"
    worst = max(errors, key=errors.__getitem__)
    middle, most = (f"{100 * e:.1f} %" for e in (statistics.median(errors.values()), errors[worst]))
    return f"median residual {middle}, worst {most} ({worst})"


def _cuts(r: RankResidual) -> list[str]:
    return [f"{name} {size}" for name, size in (("TP", r.tp), ("PP", r.pp)) if size > 1]


def residuals_file(target: str) -> Path:
    """Where the residuals of several ranks of a target lie."""
    return Path(str(resources.files("sitsc").joinpath(f"data/residuals/{target}.json")))


def rank_residuals(target: str) -> tuple[RankResidual, ...]:
    """What was measured of several ranks; empty where nobody has. Raises PlanError if damaged."""
    file = residuals_file(target)
    if not file.is_file():
        return ()
    where = f"residuals/{target}"
    try:
        return from_value(RankResiduals, json.loads(file.read_text()), where).residuals
    except ValueError as error:
        raise PlanError(f"no residuals: {error}", where=where) from None


def load_calibration(target: str) -> Calibration | None:
    """The calibration of `target`; None when it has none. Raises PlanError for a damaged file."""
    file = resources.files("sitsc").joinpath(f"data/calibration/{target}.json")
    if not file.is_file():
        return None
    try:
        return from_value(Calibration, json.loads(file.read_text()), f"calibration/{target}")
    except ValueError as error:
        raise PlanError(f"no calibration: {error}", where=f"calibration/{target}") from None
