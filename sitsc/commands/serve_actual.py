"""What serving measured: the points of the server, its start and its memory as an `Actual`."""

from sitsc.commands.machine import environment
from sitsc.core.actual import START, Actual, Measured, MeasuredMemory, actual_of
from sitsc.core.plan import Plan

_GPU = "sm_"


def start_point(plan: Plan, seconds: float, read: bool) -> Measured:
    """From the start of the process to its first token; `read`: weights came from a disk."""
    weights = plan.memory.weights_bytes if read else 0
    return Measured("serve_start_s", START, seconds, weights_bytes=weights)


def serve_actual(plan: Plan, model: str, points: tuple[Measured, ...], torch_only: int) -> Actual:
    """The measurements of this process, that served; `torch_only` as `torch_bytes` gave it."""
    peak = _peak_bytes(plan, torch_only)
    return actual_of(
        environment(plan.target.isa.startswith(_GPU)),
        digests=(plan.sha256(), plan.runs()),
        model=model,
        target=plan.target.name,
        points=points,
        memory=MeasuredMemory(peak, plan.memory.total_bytes) if peak else None,
    )


def torch_bytes(plan: Plan) -> int:
    """Memory of a process that only has torch, from which that of a CPU's artifact counts."""
    if plan.target.isa.startswith(_GPU):
        return 0
    import torch  # noqa: F401, PLC0415  (what is measured)

    from sitsc.runtime.probe import status_bytes  # noqa: PLC0415

    return status_bytes("VmRSS")


def _peak_bytes(plan: Plan, torch_only: int) -> int:
    """The most memory in use, as a bench counts it; 0 for ranks, of which this is one."""
    from sitsc.runtime.probe import status_bytes  # noqa: PLC0415

    if plan.stages:
        return 0
    if plan.target.isa.startswith(_GPU):
        import torch  # noqa: PLC0415

        return torch.cuda.max_memory_allocated()
    return status_bytes("VmHWM") - torch_only
