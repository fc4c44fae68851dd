"""The cost model behind the predictions: ceilings, error bars, assumed sizes, counted work.

In: two plans. Out: changes that say why predictions moved although the same things run.
"""

from collections.abc import Iterator

from sitsc.core.diff.change import Change
from sitsc.core.diff.fusions import alike
from sitsc.core.diff.view import listed, regimes
from sitsc.core.plan import Ceiling, Plan


def cost(a: Plan, b: Plan) -> Iterator[Change]:
    """Numbers of the target and error bars; where a number comes from does not count."""
    mine, theirs = a.target.ceilings, b.target.ceilings
    for name in sorted(set(mine) | set(theirs), key=lambda name: _nearness(mine, theirs, name)):
        before, after = (_ceiling(c.get(name)) for c in (mine, theirs))
        if before != after:
            yield Change("cost", "ceiling", name, before, after)
    bars: dict[tuple[str, str], list[str]] = {}
    for name in sorted(set(a.predictions) & set(b.predictions)):
        units = a.predictions[name].unit, b.predictions[name].unit
        if units[0] != units[1]:
            yield Change("cost", "unit", name, *units)
        before, after = a.predictions[name].error, b.predictions[name].error
        if before != after:
            pair = (f"± {100 * before:g} %", f"± {100 * after:g} %")
            bars.setdefault(pair, []).append(name)
    for (before, after), names in bars.items():
        where = "" if len(names) == len(a.predictions) else listed(names)
        yield Change("cost", "error bar", where, before, after)
    yield from _sizes(a, b)


def _nearness(a: dict[str, Ceiling], b: dict[str, Ceiling], name: str) -> tuple[float, str]:
    """How near two ceilings are, 1 for the same: those that differ most come first."""
    values = sorted(c[name].value if name in c else 0.0 for c in (a, b))
    return (values[0] / values[1] if values[1] else 1.0), name


def _ceiling(value: Ceiling | None) -> str:
    return "none" if value is None else f"{value.value:g} {value.unit}"


def _sizes(a: Plan, b: Plan) -> Iterator[Change]:
    """Sizes of a step that regimes of one name are predicted at."""
    mine, theirs = regimes(a), regimes(b)
    found: dict[tuple[str, str, str], list[str]] = {}
    for regime in (name for name in mine if name in theirs):
        for name in sorted(set(mine[regime].sizes) | set(theirs[regime].sizes)):
            before, after = (str(of[regime].sizes.get(name, "none")) for of in (mine, theirs))
            if before != after and name != "sequence_pages":
                found.setdefault((name, before, after), []).append(regime)
    for (name, before, after), names in found.items():
        yield Change("cost", f"predicted at {name}", listed(names), before, after)


def counted(a: Plan, b: Plan) -> Iterator[Change]:
    """Work and time of operators that are the same in both: only when nothing else explains it."""
    same = a.target.ceilings == b.target.ceilings
    found: dict[tuple[str, str], tuple[str, str, float, dict[str, None]]] = {}
    whole = {name: view.predicted_us or 1.0 for name, view in regimes(a).items()}
    for regime, what, one, other in alike(a, b):
        share = max(one.predicted_us, other.predicted_us) / whole[regime]
        for title, unit, before, after in (
            ("bytes counted", "B", one.bytes, other.bytes),
            ("operations counted", "FLOP", one.flops, other.flops),
        ):
            if before != after:
                row = (f"{before:.6g} {unit}", f"{after:.6g} {unit}", share, {})
                found.setdefault((title, what), row)[3][regime] = None
        alike_work = (one.bytes, one.flops) == (other.bytes, other.flops)
        if same and alike_work and one.predicted_us != other.predicted_us:
            row = (f"{one.predicted_us:.6g} µs", f"{other.predicted_us:.6g} µs", share, {})
            found.setdefault(("time of the same work", what), row)[3][regime] = None
    for (title, what), (before, after, share, names) in found.items():
        where = f"{what} in {listed(names, 1)}"
        yield Change("cost", title, where, before, after, share)
