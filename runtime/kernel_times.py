"""How long each kernel class of a decode step runs, by the profiler of the driver.

In: an idle executor with graphs. Out: µs of a step by class: the template of a kernel of ours,
"library" for those of others. Kernels that start early overlap, so that classes may sum to more
than the step takes.
"""

from typing import Any

from torch.profiler import ProfilerActivity, profile

from sitsc.core.errors import ExecutionError
from sitsc.core.plan import Plan

_WARM, _STEPS = 4, 16


def measure_kernels(executor: Any, plan: Plan, batch: int, context: int) -> dict[str, float]:
    """µs of each kernel class in a decode step of `batch` sequences with `context` tokens each.

    Raises ExecutionError where the driver's profiler shows no kernels.
    """
    page = plan.kv[0].page_tokens
    pages = -(-(context + _WARM + 2 * _STEPS) // page)
    tables = [list(range(i * pages, (i + 1) * pages)) for i in range(batch)]
    name = executor.set_decode([100 + i for i in range(batch)], [context] * batch, tables)
    for _ in range(_WARM):
        executor.replay(name)
    executor.stream.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_STEPS):
            executor.replay(name)
        executor.stream.synchronize()
    templates = sorted({launch.template for launch in _launches(plan)})
    times: dict[str, float] = {}
    for event in found.key_averages():
        if event.self_device_time_total > 0:  # others are calls of the driver
            word = kernel_class(event.key, templates)
            times[word] = times.get(word, 0.0) + event.self_device_time_total / _STEPS
    if not times:
        raise ExecutionError("the profiler shows no kernel", hint="leave out --kernels")
    return {word: round(us, 3) for word, us in sorted(times.items())}


def kernel_class(name: str, templates: list[str]) -> str:
    """A kernel of ours is called as its template; all others are "library"."""
    return name if name and name in templates else "library"


def _launches(plan: Plan) -> list[Any]:
    return [x for regime in plan.regimes for group in regime.groups for x in group.launches]
