"""Measurements of plans for tests: made from what the plan predicts, a little off each."""

from itertools import cycle
from pathlib import Path

from sitsc.core.actual import (
    SCHEMA,
    START,
    TPOT,
    TTFT,
    Actual,
    Measured,
    MeasuredKernels,
    MeasuredMemory,
    write_actual,
)
from sitsc.core.plan import Plan, Regime

OFF = (1.02, 0.97, 1.13, 0.99, 1.05, 0.91, 1.2)  # measured over predicted


def measured(plan: Plan, folder: Path) -> Path:
    """A file of measurements of all buckets, of a start, and of the kernels of decode_1."""
    points = [_point(r, off) for r, off in zip(plan.regimes, cycle(OFF), strict=False)]
    points.append(Measured("start_s", START, 3.9, weights_bytes=plan.memory.weights_bytes))
    decode = plan.regimes[0]
    kernels = MeasuredKernels("bs1", 1, float(decode.sizes["context"]), _classes(decode))
    memory = MeasuredMemory(plan.memory.total_bytes // 2, plan.memory.total_bytes)
    digests, machine = (plan.sha256(), plan.runs()), ("a machine", {"torch": "2"}, "abc", "today")
    found = Actual(SCHEMA, *digests, "model", "h200", *machine, tuple(points), memory, (kernels,))
    write_actual(found, folder / "actual.json")
    return folder / "actual.json"


def _point(regime: Regime, off: float) -> Measured:
    sizes, value = regime.sizes, off * regime.predicted_us / 1e3
    if regime.kind == "decode":
        many = sizes["sequences"]
        return Measured(f"bs{many}", TPOT, value, sequences=many, context=sizes["context"])
    return Measured(f"ttft_{sizes['tokens']}", TTFT, value, tokens=sizes["tokens"])


def _classes(regime: Regime) -> dict[str, float]:
    found: dict[str, float] = {}
    for group in regime.groups:
        for launch in group.launches:
            name, times = launch.template or launch.kind, max(1, len(group.layers))
            found[name] = found.get(name, 0.0) + launch.predicted_us * times
    return {name: us * off for (name, us), off in zip(found.items(), cycle(OFF), strict=False)}
