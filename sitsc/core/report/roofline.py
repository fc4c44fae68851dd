"""Rooflines: what each kernel class computes for a byte, and how fast, under a target's ceilings.

In: a plan and the name of a regime. Out: `Point`s, of one device, and the `Roof`. Rates are those
of predicted times; the ceilings are the plan's own.
"""

from dataclasses import dataclass

from sitsc.core.diff.view import regimes
from sitsc.core.plan import Plan
from sitsc.core.report.kinds import kind_of_operator

_READ, _FLOPS = "read_bytes_per_s", "_flops"


@dataclass(slots=True)
class Point:
    """A kernel class in all layers of a step: bytes, FLOPs and microseconds together.

    Without microseconds it is computed inside another kernel.
    """

    name: str
    op: str
    by: str
    kind: str
    layers: list[str]
    count: int = 0
    bytes: int = 0
    flops: int = 0
    us: float = 0.0

    @property
    def intensity(self) -> float:
        """FLOP for each byte; 0 where nothing is computed or nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def flops_per_s(self) -> float:
        """The predicted rate of computing."""
        return 1e6 * self.flops / self.us if self.us else 0.0

    @property
    def bytes_per_s(self) -> float:
        """The predicted rate of moving."""
        return 1e6 * self.bytes / self.us if self.us else 0.0

    @property
    def placed(self) -> bool:
        """Whether it has a place in the plot."""
        return bool(self.us and self.flops and self.bytes)


@dataclass(frozen=True, slots=True)
class Roof:
    """Ceilings of one device: bytes/s, FLOP/s by dtype, and the dtypes of the plan."""

    read: float
    peaks: dict[str, float]
    dtypes: tuple[str, ...]

    @property
    def dtype(self) -> str:
        """The fastest of the plan's dtypes."""
        return max(self.dtypes, key=lambda dtype: self.peaks[dtype])

    @property
    def peak(self) -> float:
        """FLOP/s of the fastest of the plan's dtypes."""
        return self.peaks[self.dtype]

    @property
    def ridge(self) -> float:
        """FLOP for each byte where computing takes as long as reading."""
        return self.peak / self.read

    def limit(self, intensity: float) -> str:
        """What limits at an intensity: "memory" or "compute"."""
        return "memory" if intensity < self.ridge else "compute"

    def share(self, point: Point) -> float:
        """Predicted over allowed: of the time, 1 at the ceiling."""
        allowed_us = 1e6 * max(point.bytes / self.read, point.flops / self.peak)
        return allowed_us / point.us if point.us else 0.0


def roof(plan: Plan) -> Roof | None:
    """The ceilings of a plan; None where it names none that a roofline needs."""
    ceilings = plan.target.ceilings
    peaks = {
        name.removesuffix(_FLOPS): item.value
        for name, item in ceilings.items()
        if name.endswith(_FLOPS)
    }
    numerics = plan.numerics
    names = (numerics.dtype, numerics.weights, numerics.accumulate)
    dtypes = tuple(name for name in dict.fromkeys(names) if name in peaks)
    if _READ not in ceilings or not dtypes:
        return None
    return Roof(ceilings[_READ].value, peaks, dtypes)


def points(plan: Plan, name: str) -> list[Point]:
    """Kernel classes of a regime over all layers and stages, the slowest first."""
    found: dict[tuple[str, str, str], Point] = {}
    for (layer_class, row, op), operator in regimes(plan)[name].operators.items():
        key = (row, op, operator.by)
        point = found.setdefault(key, Point(row, op, operator.by, kind_of_operator(op), []))
        point.layers += [layer_class] if layer_class else []
        point.count += operator.count
        point.bytes += operator.bytes
        point.flops += operator.flops
        point.us += operator.predicted_us
    return sorted(found.values(), key=lambda point: (-point.us, point.name, point.op))
