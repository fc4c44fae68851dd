"""Calibration: how far kernels of a target stay below its ceilings, from measurements.

In: data/calibration/<target>.json, which `sitsc plan calibrate` writes from results. Out: a
`Calibration` with what it was fitted on and how far it was off elsewhere. Types no number by hand.
"""

import json
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
        begins = {"tpot": "bs"}.get(kind, kind)
        points = ((r, r.point.removeprefix("serve_")) for r in self.residuals if not r.fitted)
        found = (r for r, point in points if point.startswith(begins))
        return tuple(abs(r.error) for r in found)

    def value(self, name: str) -> float:
        """One parameter."""
        return self.parameters[name].value


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


def measured_error(data: TargetData, kind: str) -> float:
    """The worst residual of "tpot" or "ttft" that was not fitted; what the file says without."""
    own = load_calibration(data.target.name)
    errors = () if own is None else own.errors(kind)
    return float(f"{max(errors):.3g}") if errors else data.prediction_error


def load_calibration(target: str) -> Calibration | None:
    """The calibration of `target`; None when it has none. Raises PlanError for a damaged file."""
    file = resources.files("sitsc").joinpath(f"data/calibration/{target}.json")
    if not file.is_file():
        return None
    try:
        return from_value(Calibration, json.loads(file.read_text()), f"calibration/{target}")
    except ValueError as error:
        raise PlanError(f"no calibration: {error}", where=f"calibration/{target}") from None
