"""Compares two plans section by section.

In: two opened plans. Out: a `PlanDiff`. Says what cannot be compared and why, and warns of changed
predictions that are smaller than their error bars. Byte for byte the same for the same plans.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sitsc.core.diff import cost, decisions, figures, fusions, kernels
from sitsc.core.diff import model as of_model
from sitsc.core.diff.change import SECTIONS, Change, Figure, PlanDiff
from sitsc.core.diff.read import Opened
from sitsc.core.plan import Plan

_ALL = ("model", "regimes", "stages")


@dataclass(frozen=True, slots=True)
class _Section:
    """How one section is compared, and which sections of both plans that needs.

    `one_model`: it makes sense only for plans of one model.
    """

    name: str
    compare: Callable[[Plan, Plan], Iterator[Change]]
    needs: tuple[str, ...]
    one_model: bool = False


_COMPARED = (
    _Section("target", decisions.target, ("target",)),
    _Section("parallel", decisions.parallel, ("parallel", "target", "ranks", "schedule", *_ALL)),
    _Section("numerics", decisions.numerics, ("numerics",)),
    _Section("model", of_model.model, ("model", "tokens", "stages"), one_model=True),
    _Section("schedule", decisions.schedule, ("schedule", "tokens", "regimes", "stages")),
    _Section("kv", decisions.kv, ("kv", "regimes", "stages"), one_model=True),
    _Section("fusions", fusions.fusions, _ALL, one_model=True),
    _Section("kernels", kernels.kernels, (*_ALL, "packages"), one_model=True),
    _Section("cost", cost.cost, ("target", "predictions", "regimes", "stages")),
    _Section("memory", decisions.memory, ("memory",)),
)
_EXPLAIN = ("parallel", "numerics", "model", "kv", "fusions", "kernels")  # why work differs
_PREDICTED = ("predictions", "regimes", "stages", "parallel")
_SIZES = ("memory", "kv", "parallel", "regimes", "stages")


def compare(a: Opened, b: Opened) -> PlanDiff:
    """What B does otherwise than A."""
    unread = {name: f"{why} in A" for name, why in a.unread.items()}
    unread |= {name: f"{why} in B" for name, why in b.unread.items()}
    changes = list(_incomparable(a, b, unread))
    other = "" if {"model", "regimes"} & set(unread) else of_model.other_model(a.plan, b.plan)
    if other:
        changes.append(Change("comparison", "different models", "", *_models(a, b)))
    skipped: dict[str, str] = {}
    for section in _COMPARED:
        missing = [name for name in section.needs if name in unread]
        if missing:
            skipped[section.name] = f"{missing[0]}: {unread[missing[0]]}"
        elif section.one_model and other:
            skipped[section.name] = other
        else:
            changes += section.compare(a.plan, b.plan)
    explained = {change.section for change in changes} & set(_EXPLAIN)
    if not explained and not skipped:
        changes += cost.counted(a.plan, b.plan)
    found: list[Figure] = []
    for name, wanted, make in (
        ("predictions", _PREDICTED, figures.predicted),
        ("sizes", _SIZES, figures.sizes),
    ):
        if missing := [need for need in wanted if need in unread]:
            skipped[name] = f"{missing[0]}: {unread[missing[0]]}"
        else:
            found += make(a.plan, b.plan)
    ordered = sorted(changes, key=_order)
    return PlanDiff(
        a.side, b.side, tuple(ordered), tuple(found), skipped, tuple(_warnings(a, b, found))
    )


def _order(change: Change) -> tuple[int, float]:
    """By section, then by the time that it concerns; sorting keeps the order of finding."""
    return SECTIONS.index(change.section), -round(change.share, 6)


def _models(a: Opened, b: Opened) -> tuple[str, str]:
    return a.side.model, b.side.model


def _incomparable(a: Opened, b: Opened, unread: dict[str, str]) -> Iterator[Change]:
    if a.schema != b.schema:
        yield Change("comparison", "different schemas", "", str(a.schema), str(b.schema))
    elif unread:
        yield Change("comparison", "schema unknown here", "", str(a.schema), str(b.schema))


def _warnings(a: Opened, b: Opened, found: list[Figure]) -> Iterator[str]:
    """Changed predictions that may be no change at all; bytes that differ without a reason."""
    changed = [figure for figure in found if figure.error and figure.changed]
    small = [figure for figure in changed if figure.within_error]
    if small:
        bar = f"the error bar (± {100 * max(figure.error for figure in small):g} %)"
        which = f"{len(small)} of {len(changed)} changed predictions are"
        which = "every changed prediction is" if len(small) == len(changed) else which
        yield f"{which} smaller than {bar}: measure before relying on it"
    unread = {*a.unread, *b.unread}
    if a.side.target != b.side.target and "target" not in unread:
        yield f"A is for {a.side.target}, B for {b.side.target}: kernels and times differ by that"
