"""Targets: the limits of each kind of hardware, read from data files with their evidence."""

import json
import re
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
class Host:
    """Devices of one host together: how many a host usually has at most (0: any number), their
    link, and the algorithms that the runtime has there.

    Names are those of `sitsc/data/links/` and `sitsc/core/links.py`; `source` says where from.
    """

    devices: int
    link: str
    collectives: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class TargetData:
    """One target file: the target for the plan, and the relative error of predictions so far."""

    target: Target
    prediction_error: float
    host: Host
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
    host: Host
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
        refuse_mixed(name)
        known, (kind, colon, number) = target_names(), name.partition(":")
        apart = bool(colon) and kind in known
        hint = f"--target {kind} --devices {number}" if apart else f"one of: {', '.join(known)}"
        raise TargetError(f"unknown target {name!r}", hint=hint)
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
    return TargetData(target, data.prediction_error, data.host, data.cuda)


def refuse_mixed(name: str) -> None:
    """Raises TargetError for a list such as "h200,h100": devices of an artifact are alike."""
    parts = [part for part in re.split(r"[,;+\s]+", name) if part]
    if len(parts) < 2:
        return
    kinds = list(dict.fromkeys(part.partition(":")[0] for part in parts))
    if len(kinds) == 1:
        counts = [int(number) if number.isdecimal() else 1 for number in map(_number, parts)]
        raise TargetError(
            f"--target {name} names one kind of device several times",
            hint=f"--target {kinds[0]}:{sum(counts)}, or --target {kinds[0]} --devices "
            f"{sum(counts)}",
        )
    raise TargetError(
        f"--target {name}: devices of mixed types are not supported in one artifact",
        hint=f"one for each: {' and '.join(f'--target {kind}' for kind in kinds)}",
    )


def _number(part: str) -> str:
    return part.partition(":")[2]


def target_of_gpu(device: str) -> TargetData | None:
    """The target of a GPU by what it calls itself, such as "NVIDIA A100-SXM4-80GB"; None if none.

    Of several the one with the longest name.
    """
    plain = re.sub("[^a-z0-9]", "", device.lower())
    found = [name for name in target_names() if name in plain]
    gpus = [data for data in map(load_target, found) if data.cuda is not None]
    return max(gpus, key=lambda data: len(data.target.name), default=None)


def shared_memory_bytes(sm: int) -> int:
    """The most shared memory of a thread block on compute capability `sm`. Raises TargetError."""
    gpus = [data.cuda for data in map(load_target, target_names()) if data.cuda is not None]
    sizes = [gpu.shared_bytes for gpu in gpus if gpu.sm == sm]
    if not sizes:
        known = ", ".join(sorted({str(gpu.sm) for gpu in gpus}, key=int))
        raise TargetError(f"no target has sm_{sm}", hint=f"one of: {known}")
    return min(sizes)
