"""Calibration: how far kernels of a target stay below its ceilings, from measurements.

In: data/calibration/<target>.json, which bench/calibrate.py writes from result files. Out: a
`Calibration` with what it was fitted on and how far it was off elsewhere. Types no number by hand.
"""

import json
from dataclasses import dataclass
from importlib import resources

from sitsc.core.errors import PlanError
from sitsc.core.records import from_value

REFERENCE = "h200"  # the target whose shares stand for GPUs that nobody has measured


@dataclass(frozen=True, slots=True)
class Parameter:
    """One fitted or known number and where it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Residual:
    """One measured point and what the model says of it; `fitted` when it was used to fit."""

    model: str
    point: str
    measured_ms: float
    predicted_ms: float
    fitted: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ms / self.measured_ms - 1


@dataclass(frozen=True, slots=True)
class Calibration:
    """Shares of the ceilings, by name, and the residuals behind them.

    `parameters` holds kernel_seconds (fixed cost of a kernel in a step), read_share (of the read
    ceiling, kernels on tensor cores), fill_power (of the share of multiprocessors that tiles of a
    library product keep busy), matmul_share (of the matmul ceiling), host_seconds (the host's, to
    launch a kernel outside of a graph) and flops_per_exp (matmul operations in the time of one
    exponential).
    """

    target: str
    parameters: dict[str, Parameter]
    residuals: tuple[Residual, ...]
    median_error: float
    worst_error: float

    def value(self, name: str) -> float:
        """One parameter."""
        return self.parameters[name].value


def calibrated() -> list[str]:
    """Targets with a calibration of their own."""
    folder = resources.files("sitsc").joinpath("data/calibration")
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".json"))


def load_calibration(target: str) -> Calibration | None:
    """The calibration of `target`; None when it has none. Raises PlanError for a damaged file."""
    file = resources.files("sitsc").joinpath(f"data/calibration/{target}.json")
    if not file.is_file():
        return None
    try:
        return from_value(Calibration, json.loads(file.read_text()), f"calibration/{target}")
    except ValueError as error:
        raise PlanError(f"no calibration: {error}", where=f"calibration/{target}") from None
