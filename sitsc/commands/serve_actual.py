"""What serving measured: the points of the server, its start and its memory as an `Actual`."""

from typing import Any

from sitsc.core.actual import SCHEMA, START, Actual, Measured, MeasuredMemory
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
