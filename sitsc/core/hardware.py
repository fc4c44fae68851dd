"""Targets: the limits of each kind of hardware, read from data files with their evidence."""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sitsc.core.errors import TargetError
from sitsc.core.plan import Ceiling, Target
from sitsc.core.records import from_value


@dataclass(frozen=True, slots=True)
class CudaLimits:
    """What one GPU has: `shared_bytes` is the most that one thread block may ask for."""

    sm: int
    num_sms: int
    shared_bytes: int
    l2_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class TargetData:
    """One target file: the target for the plan, and the relative error of predictions so far."""

    target: Target
    prediction_error: float
    cuda: CudaLimits | None = None


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    isa: str
    threads: int
    topology: str
    memory_bytes: int
    ceilings: dict[str, Ceiling]
    prediction_error: float
    cuda: CudaLimits | None


def target_names() -> list[str]:
    """Names of the targets that have a data file."""
    folder = resources.files("sitsc").joinpath("data/targets")
    return sorted(
        f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")
    )


def load_target(name: str) -> TargetData:
    """The target `name`. Raises TargetError for an unknown one, naming those known."""
    if name not in target_names():
        known = ", ".join(target_names())
        raise TargetError(f"unknown target {name!r}", hint=f"one of: {known}")
    text = resources.files("sitsc").joinpath(f"data/targets/{name}.json").read_text()
    value: Any = {"cuda": None} | json.loads(text)
    data = from_value(_File, value, f"targets/{name}")
    target = Target(
        name=data.name,
        isa=data.isa,
        device_count=1,
        threads=data.threads,
        topology=data.topology,
        memory_bytes=data.memory_bytes,
        ceilings=data.ceilings,
    )
    return TargetData(target, data.prediction_error, data.cuda)


def shared_memory_bytes(sm: int) -> int:
    """The most shared memory of a thread block on compute capability `sm`. Raises TargetError."""
    gpus = [data.cuda for data in map(load_target, target_names()) if data.cuda is not None]
    sizes = [gpu.shared_bytes for gpu in gpus if gpu.sm == sm]
    if not sizes:
        known = ", ".join(sorted({str(gpu.sm) for gpu in gpus}, key=int))
        raise TargetError(f"no target has sm_{sm}", hint=f"one of: {known}")
    return min(sizes)
