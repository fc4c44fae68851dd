"""Fits the cost model of a GPU to what was measured: the shares of its ceilings, as data.

In: measurements, the records of their models, the calibration so far. Out: a `Calibration` with
every residual. Each parameter is fitted to one point that shows it; all others are the score.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sitsc.core.actual import START, TPOT, TTFT, Actual
from sitsc.core.calibration import REFERENCE, Calibration, Parameter, Residual, load_calibration
from sitsc.core.errors import OptionError
from sitsc.core.hardware import TargetData, load_target
from sitsc.core.tiles import GEMV_TOKENS, SKINNY_TOKENS
from sitsc.passes.collectives import topology
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.op_time import Cut, Device, Sizes, device_of
from sitsc.passes.step_time import StepModel

__all__ = ["calibrate", "halved", "scored", "start_parameter"]

_ROUNDS, _HALVINGS = 12, 40
# Parameter of Device → its bounds, and whether more of it takes more time.
_BOUNDS = {
    "kernel_us": (0.1, 20.0, True),
    "read_share": (0.2, 1.5, False),
    "matmul_share": (0.2, 1.5, False),
    "fill_power": (0.0, 3.0, True),
    "host_us": (0.0, 50.0, True),
}
_NAMES = {"kernel_us": "kernel_seconds", "host_us": "host_seconds"}
_START = "start_seconds"
Key = tuple[str, str]  # model, point
Step = Callable[[Device, str, Sizes], float]


@dataclass(frozen=True, slots=True)
class _Point:
    sizes: Sizes
    ms: float
    source: str

    @property
    def decode(self) -> bool:
        return self.sizes.tokens == self.sizes.sequences


def calibrate(
    target: str,
    results: Iterable[Actual],
    record: Callable[[str], ModelRecord],
    *,
    fresh: bool = False,
) -> Calibration:
    """The calibration of `target`; earlier points stay unless `fresh` or measured again.

    CPUs: `cpu_calibration`. Raises OptionError for results of another target and when points are
    too few.
    """
    data, own = load_target(target), load_calibration(target)
    results = tuple(results)
    for actual in results:
        if actual.target != target:
            what = f"{actual.model} was measured on {actual.target}, not {target}"
            raise OptionError(what, hint=f"sitsc plan calibrate {actual.target}")
    earlier = own.residuals if own is not None and not fresh else ()
    known = {(r.model, r.point): _Point(_sizes_of(r), r.measured_ms, r.source) for r in earlier}
    known |= {key: point for actual in results for key, point in _points(actual).items()}
    base = own or load_calibration(REFERENCE)
    roles = _roles(known)
    if not roles or base is None:
        raise OptionError("no measured point to fit to", hint="sitsc bench the artifact first")
    records = {model: record(model) for model in sorted({model for model, _ in known})}
    alone = topology(1, 1, "nvlink", "nvlink")

    def step(device: Device, model: str, sizes: Sizes) -> float:
        return StepModel(records[model], device, alone).step_us(sizes, Cut()) / 1e3

    device = _fit(device_of(data, base), roles, known, step)
    made = base.parameters | _parameters(device, roles, known, data)
    made |= start_parameter(results, max(roles.values(), key=lambda key: known[key].ms)[0], data)
    found = Calibration(target, made, (), 0.0, 0.0)
    residuals = _residuals(found, data, known, set(roles.values()), step)
    return scored(replace(found, residuals=residuals), data)


def _points(actual: Actual) -> dict[Key, _Point]:
    source = f"{actual.hardware}, {actual.date}, plan {actual.plan[:12]}"
    found: dict[Key, _Point] = {}
    for point in actual.points:
        if point.kind == TPOT:
            many = point.sequences
            sizes = Sizes(many, many, many, round(point.context))
        elif point.kind == TTFT:
            sizes = Sizes(point.tokens, 1, 1, 0)
        else:
            continue
        found[actual.model, point.key] = _Point(sizes, point.value, source)
    return found


def _sizes_of(r: Residual) -> Sizes:
    return Sizes(r.tokens, r.sequences, r.sequences, r.context)


def _roles(known: dict[Key, _Point]) -> dict[str, Key]:
    """The point that shows each parameter, as far as there is one.

    In the largest model: the smallest decode step is made of kernels, the largest on our tensor
    core kernels reads, the largest of the library fills multiprocessors, a middle prompt computes.
    In the smallest one a short prompt waits for the host.
    """
    decode = {key: point for key, point in known.items() if point.decode}
    prompts = {key: point for key, point in known.items() if not point.decode}
    ranked = sorted({model for model, _ in decode}, key=lambda m: _least_ms(decode, m))
    if not ranked:
        return {}
    rows = {key: p for key, p in decode.items() if key[0] == ranked[-1]}

    def size(key: Key) -> tuple[int, int]:
        return known[key].sizes.sequences, known[key].sizes.context

    few = [key for key in rows if size(key)[0] <= GEMV_TOKENS]
    some = [key for key in rows if GEMV_TOKENS < size(key)[0] <= SKINNY_TOKENS]
    many = [key for key in rows if size(key)[0] > SKINNY_TOKENS]
    long = sorted((k for k in prompts if k[0] == ranked[-1]), key=lambda k: known[k].sizes.tokens)
    short = [k for k in prompts if k[0] == ranked[0] and len(ranked) > 1]
    found = {
        "kernel_us": min(few, key=size, default=None),
        "read_share": max(some, key=size, default=None),
        "matmul_share": long[len(long) // 2] if long else None,
        "fill_power": max(many, key=size, default=None),
        "host_us": min(short, key=lambda k: known[k].sizes.tokens, default=None),
    }
    return {name: key for name, key in found.items() if key is not None}


def _least_ms(decode: dict[Key, _Point], model: str) -> float:
    return min(point.ms for key, point in decode.items() if key[0] == model)


def _fit(device: Device, roles: dict[str, Key], known: dict[Key, _Point], step: Step) -> Device:
    """Each parameter in turn by halving, until they agree."""
    for _ in range(_ROUNDS):
        for name, key in roles.items():
            device = replace(device, **{name: _fitted(name, device, key[0], known[key], step)})
    return device


def _fitted(name: str, device: Device, model: str, point: _Point, step: Step) -> float:
    """One parameter, with which a point is as it was measured."""
    low, high, adds = _BOUNDS[name]

    def beyond(value: float) -> bool:
        return (step(replace(device, **{name: value}), model, point.sizes) > point.ms) == adds

    return halved(low, high, beyond)


def halved(low: float, high: float, beyond: Callable[[float], bool]) -> float:
    """Where `beyond` begins to hold between two bounds."""
    middle = low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if beyond(middle) else (middle, high)
    return middle


def _parameters(
    device: Device, roles: dict[str, Key], known: dict[Key, _Point], data: TargetData
) -> dict[str, Parameter]:
    """The fitted numbers with their source; of a kernel what it costs beyond the gap."""
    found = {}
    gap = data.target.ceilings["launch_seconds"].value
    for field, key in roles.items():
        value, unit = getattr(device, field), "1"
        if field.endswith("_us"):
            value, unit = 1e-6 * value - (gap if field == "kernel_us" else 0.0), "s"
        source = f"fitted to {key[1]} of {key[0]}, {known[key].source}"
        found[_NAMES.get(field, field)] = Parameter(float(f"{value:.4g}"), unit, source)
    return found


def start_parameter(
    results: Iterable[Actual], model: str, data: TargetData
) -> dict[str, Parameter]:
    """What a start takes besides reading weights, by the largest model of the newest results."""
    rate = data.target.ceilings["weights_load_bytes_per_s"].value
    found = {}
    for actual in sorted(results, key=lambda a: (a.date, a.model == model)):
        for point in actual.points:
            if point.kind == START and point.value > point.weights_bytes / rate:
                seconds = float(f"{point.value - point.weights_bytes / rate:.4g}")
                source = f"{point.key} of {actual.model}, {actual.hardware}, {actual.date}"
                found[_START] = Parameter(seconds, "s", f"{source}, less reading of weights")
    return found


def _residuals(
    made: Calibration, data: TargetData, known: dict[Key, _Point], fitted: set[Key], step: Step
) -> tuple[Residual, ...]:
    device = device_of(data, made)
    return tuple(
        Residual(
            model=key[0],
            point=key[1],
            tokens=point.sizes.tokens,
            sequences=point.sizes.sequences,
            context=point.sizes.context,
            measured_ms=point.ms,
            predicted_ms=float(f"{step(device, key[0], point.sizes):.5g}"),
            fitted=key in fitted,
            source=point.source,
        )
        for key, point in known.items()
    )


def scored(made: Calibration, data: TargetData) -> Calibration:
    """With the errors of its residuals that were not fitted; of none, what the target says."""
    errors = [abs(r.error) for r in made.residuals if not r.fitted] or [data.prediction_error]
    median, worst = (float(f"{e:.3g}") for e in (statistics.median(errors), max(errors)))
    return replace(made, median_error=median, worst_error=worst)
