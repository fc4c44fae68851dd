"""A plan as the comparison looks at it: stages joined, layers of two plans paired.

In: a `Plan`, of one rank or of several. Out: operators and launches of a layer or of the rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from sitsc.core.layer_names import LAYER, NEXT
from sitsc.core.plan import KvGroup, Launch, Memory, Plan, Regime
from sitsc.core.weight_spec import WeightSpec

REST = ""  # the name of what is in no layer


@dataclass(frozen=True, slots=True)
class Program:
    """What the ranks of one stage run; a plan without stages is one program."""

    regimes: tuple[Regime, ...]
    kv: tuple[KvGroup, ...]
    memory: Memory
    parameters: tuple[WeightSpec, ...]


@dataclass(slots=True)
class Operator:
    """An operator of a layer class in all its layers: how often, and what it costs together."""

    by: str
    count: int = 0
    bytes: int = 0
    flops: int = 0
    predicted_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Pair:
    """Layers that are of one class in A and of one in B; without layers, all the rest."""

    a: str
    b: str
    layers: tuple[int, ...] = ()


@dataclass(slots=True)
class RegimeView:
    """A regime over all stages: operators by (layer class, name, operator), time, launches."""

    sizes: dict[str, int]
    predicted_us: float = 0.0
    slowest_us: float = 0.0
    operators: dict[tuple[str, str, str], Operator] = field(default_factory=dict)
    in_layer: dict[int, tuple[Launch, ...]] = field(default_factory=dict)
    rest: list[Launch] = field(default_factory=list)


def programs(plan: Plan) -> tuple[Program, ...]:
    """The programs of a plan in the order of its stages."""
    if not plan.stages:
        parameters = getattr(plan.model, "parameters", ())  # no model: read in part
        return (Program(plan.regimes, plan.kv, plan.memory, parameters),)
    found = []
    for stage in plan.stages:
        parameters = tuple(spec for rank in stage.parameters for spec in rank)
        found.append(Program(stage.regimes, stage.kv, stage.memory, parameters))
    return tuple(found)


def regimes(plan: Plan) -> dict[str, RegimeView]:
    """Every regime by its name."""
    found: dict[str, RegimeView] = {}
    for program in programs(plan):
        for regime in program.regimes:
            view = found.setdefault(regime.name, RegimeView(regime.sizes))
            view.predicted_us += regime.predicted_us
            view.slowest_us = max(view.slowest_us, regime.predicted_us)
            _add(view, regime)
    return found


def _add(view: RegimeView, regime: Regime) -> None:
    for row in regime.kernels:
        key = (row.layer_class, row.name, row.op)
        operator = view.operators.setdefault(key, Operator(row.by))
        operator.count += row.count
        operator.bytes += row.bytes
        operator.flops += row.flops
        operator.predicted_us += row.predicted_us
    for group in regime.groups:
        for layer in group.layers:
            view.in_layer[layer] = (*view.in_layer.get(layer, ()), *group.launches)
        if not group.layers:
            view.rest.extend(group.launches)


def layer_pairs(a: Plan, b: Plan) -> tuple[Pair, ...]:
    """Pairs of layer classes by the layers that they share, then the rest."""
    theirs = {layer: c.name for c in b.model.layer_classes for layer in c.layers}
    found: dict[tuple[str, str], list[int]] = {}
    for mine in a.model.layer_classes:
        for layer in mine.layers:
            if layer in theirs:
                found.setdefault((mine.name, theirs[layer]), []).append(layer)
    pairs = [Pair(*names, tuple(layers)) for names, layers in found.items()]
    return (*sorted(pairs, key=lambda pair: pair.layers), Pair(REST, REST))


def spans(numbers: Iterable[int]) -> str:
    """Sorted numbers as ranges, both ends included: "0-3 7"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return " ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def listed(names: Iterable[str], most: int = 4) -> str:
    """Names with commas, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def plain_name(buffer: str) -> str:
    """A weight's name without layer number, prefix and suffix: "mlp.down_proj"."""
    parts = [part for part in buffer.split(".") if not part.isdigit() and part not in (LAYER, NEXT)]
    return ".".join(part for part in parts if part not in ("model", "layers", "weight")) or buffer
