"""What serving measured, kept as `actual.json` beside the artifact.

In: the points of the server, and of the start. Out: an `Actual`; measurements of the same plan,
machine and commit that a bench has left there stay in it.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from sitsc.core.actual import (
    SCHEMA,
    START,
    Actual,
    Measured,
    MeasuredMemory,
    actual_place,
    read_actual,
    write_actual,
)
from sitsc.core.errors import SitscError
from sitsc.core.plan import Plan


def start_point(plan: Plan, seconds: float, read: bool) -> Measured:
    """From the start of the process to its first token; `read`: weights came from a disk."""
    weights = plan.memory.weights_bytes if read else 0
    return Measured("serve_start_s", START, seconds, weights_bytes=weights)


def make_actual(
    plan: Plan, model: str, points: tuple[Measured, ...], peak_bytes: int, facts: dict[str, Any]
) -> Actual:
    """The measurements of one time of serving; `facts` are those of the machine and the day."""
    return Actual(
        schema=SCHEMA,
        plan=plan.sha256(),
        runs=plan.runs(),
        model=model,
        target=plan.target.name,
        hardware=facts["hardware"],
        versions=facts["versions"],
        commit=facts["commit"],
        date=facts["date"],
        points=points,
        memory=MeasuredMemory(peak_bytes, plan.memory.total_bytes) if peak_bytes else None,
        kernels=(),
    )


def keep(actual: Actual, artifact: Path, place: Path | None) -> Path:
    """Write the measurements, those from before included where they are alike; where they are."""
    path = place or actual_place(artifact)
    write_actual(_joined(actual, path), path)
    return path


def _joined(actual: Actual, path: Path) -> Actual:
    try:
        before = read_actual(path)
    except SitscError:
        return actual
    if _circumstances(before) != _circumstances(actual):
        return actual
    new = {point.key for point in actual.points}
    kept = tuple(point for point in before.points if point.key not in new)
    memory = max(
        (one.memory for one in (before, actual) if one.memory is not None),
        key=lambda memory: memory.peak_bytes,
        default=None,
    )
    return replace(actual, points=kept + actual.points, memory=memory, kernels=before.kernels)


def _circumstances(actual: Actual) -> tuple[Any, ...]:
    return actual.runs, actual.plan, actual.hardware, actual.versions, actual.commit
