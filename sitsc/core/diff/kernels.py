"""Kernels by layer class: library or ours, template, tile, grid, types of arguments, code.

In: two plans of one model. Out: one change for each thing that differs, whatever number of layers
and regimes it is in. Launches are paired by the weight that they read, else by their template.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from sitsc.core.diff.change import Change
from sitsc.core.diff.view import (
    Pair,
    RegimeView,
    layer_pairs,
    listed,
    plain_name,
    regimes,
    spans,
)
from sitsc.core.plan import UNMATCHED, Launch, Plan

_ARGUMENTS = "arguments"
_PACKAGE = "package"  # every bucket launches the same ones; rows tell what is in them
_BESIDE = ("norm_ptr", "bias_ptr", "bias", "residual_ptr")  # weights that a kernel takes as well


@dataclass(slots=True)
class _Told:
    """Where one change was found."""

    layers: set[int] = field(default_factory=set)
    regimes: dict[str, None] = field(default_factory=dict)
    us: float = 0.0


Found = dict[tuple[str, str, str, str], _Told]


def kernels(a: Plan, b: Plan) -> Iterator[Change]:
    """All changes of launches, and of what computes each operator."""
    mine, theirs = regimes(a), regimes(b)
    common = [name for name in mine if name in theirs]
    whole = sum(mine[name].predicted_us for name in common) or 1.0
    found: Found = {}
    for name in common:
        for pair in layer_pairs(a, b):
            _by(found, name, mine[name], theirs[name], pair)
            if pair.layers:
                first = pair.layers[0]
                sides = (view[name].in_layer.get(first, ()) for view in (mine, theirs))
            else:
                sides = (tuple(view[name].rest) for view in (mine, theirs))
            _launches(found, name, pair, *sides)
    merged: dict[tuple[str, str, str, str], tuple[list[str], list[float]]] = {}
    for (title, what, before, after), told in found.items():
        place = " ".join(part for part in (_place(told), _in_regimes(told, mine)) if part)
        names, times = merged.setdefault((title, before, after, place), ([], []))
        names.append(what)
        times.append(told.us)
    for (title, before, after, place), (names, times) in merged.items():
        where = " ".join(part for part in (listed(names, 2), place) if part)
        yield Change("kernels", title, where, before, after, sum(times) / whole)
    yield from _packages(a, b)


def _packages(a: Plan, b: Plan) -> Iterator[Change]:
    mine, theirs = ([p.name for s in (x.stages or (x,)) for p in s.packages] for x in (a, b))
    if sorted(mine) != sorted(theirs):
        yield Change("kernels", "packages", "", listed(mine) or "none", listed(theirs) or "none")


def _place(told: _Told) -> str:
    return f"in layers {spans(told.layers)}" if told.layers else ""


def _in_regimes(told: _Told, all_regimes: dict[str, RegimeView]) -> str:
    """ "(decode 1 2 4)"; nothing where it is every regime."""
    if len(told.regimes) == len(all_regimes):
        return ""
    kinds: dict[str, list[str]] = {}
    for name in told.regimes:
        kind, _, size = name.partition("_")
        kinds.setdefault(kind, []).append(size)
    whole = {kind: [n for n in all_regimes if n.partition("_")[0] == kind] for kind in kinds}
    words = [k if len(s) == len(whole[k]) else f"{k} {' '.join(s)}" for k, s in kinds.items()]
    return f"({', '.join(words)})"


def _note(found: Found, regime: str, pair: Pair, key: tuple[str, str, str, str], us: float) -> None:
    told = found.setdefault(key, _Told())
    told.layers |= set(pair.layers)
    told.regimes[regime] = None
    told.us += us


def _by(found: Found, regime: str, mine: RegimeView, theirs: RegimeView, pair: Pair) -> None:
    """Operators that another kind of code computes: a kernel of ours, Inductor, an unmatched op."""
    for (layer_class, name, op), operator in mine.operators.items():
        twin = theirs.operators.get((pair.b, name, op)) if layer_class == pair.a else None
        if twin is not None and (before := _code(operator.by)) != (after := _code(twin.by)):
            key = ("computed by", f"{name} {op.removeprefix('sitsc.')}", before, after)
            _note(found, regime, pair, key, operator.predicted_us)


def _code(by: str) -> str:
    """The kind of code; which kernels of ours or the library's there are, is told by launches."""
    return by if by.startswith((UNMATCHED, "inductor")) else "kernel"


# --- launches -----------------------------------------------------------------------------------


def _launches(
    found: Found, regime: str, pair: Pair, mine: tuple[Launch, ...], theirs: tuple[Launch, ...]
) -> None:
    counts = [sum(x.kind == _PACKAGE for x in side) for side in (mine, theirs)]
    if all(counts) and counts[0] != counts[1]:  # other stages: what they take is told as theirs
        mine, theirs = (tuple(x for x in side if x.kind != _PACKAGE) for side in (mine, theirs))
    times = max(1, len(pair.layers))
    names_a, names_b = _names(mine), _names(theirs)
    for one, other in _paired(names_a, names_b):
        name = names_a[one] if one is not None else names_b[other or 0]
        before = mine[one] if one is not None else None
        after = theirs[other] if other is not None else None
        us = times * max(x.predicted_us for x in (before, after) if x is not None)
        if before is not None and after is not None:
            for key in _differences(name, before, after):
                _note(found, regime, pair, key, us)
        elif before is not None:
            _note(found, regime, pair, ("kernel gone", _full(name, before), "", ""), us)
        elif after is not None:
            _note(found, regime, pair, ("kernel added", _full(name, after), "", ""), us)


def _names(launches: Sequence[Launch]) -> list[str]:
    """What each launch computes, in words that stay when its template changes."""
    return [launch_name(launch) for launch in launches]


def launch_name(launch: Launch) -> str:
    """What a launch computes: the weight that it reads, else its template."""
    weights = [a for a in launch.arguments if a.source == "weight"]
    main = [a for a in weights if a.name not in _BESIDE] or weights
    return plain_name(main[-1].buffer) if main and launch.kind != _PACKAGE else launch.template


def _paired(a: list[str], b: list[str]) -> Iterator[tuple[int | None, int | None]]:
    """Indices that belong together; None where one side has nothing."""
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    for _, low, high, start, stop in matcher.get_opcodes():
        left, right = list(range(low, high)), list(range(start, stop))
        for one in list(left):
            family = a[one].partition("_")[0]
            other = next((j for j in right if b[j].partition("_")[0] == family), None)
            if other is not None:
                yield one, other
                left.remove(one)
                right.remove(other)
        yield from ((one, None) for one in left)
        yield from ((None, other) for other in right)


def what_runs(launch: Launch) -> str:
    """The library's function, or the template of our kernel."""
    return f"library {launch.kernel}" if launch.kind == "library" else launch.template


def _full(name: str, launch: Launch) -> str:
    """What a launch computes, and by which template."""
    return name if name == launch.template else f"{name} {what_runs(launch)}"


def _differences(name: str, a: Launch, b: Launch) -> Iterator[tuple[str, str, str, str]]:
    """(title, where, before, after) of two launches that compute the same; the first that tells."""
    if (a.kind, a.template) != (b.kind, b.template):
        titles = {("kernel", "library"): "library, not ours", ("library", "kernel"): "ours"}
        yield titles.get((a.kind, b.kind), "template"), name, what_runs(a), what_runs(b)
        return
    full = _full(name, a)
    told = a.tile != b.tile
    if told:
        keys = [k for k in sorted({*a.tile, *b.tile}) if a.tile.get(k) != b.tile.get(k)]
        before, after = (" ".join(f"{k} {x.tile.get(k, '-')}" for k in keys) for x in (a, b))
        yield "tile", full, before, after
    for what, before, after in _signature(a, b):
        if told and what == _ARGUMENTS and a.tile != b.tile:
            continue  # the other tile takes them
        told = True
        yield what, name, before, after
    if told:
        return
    if a.grid != b.grid:
        yield "grid", full, _grid(a), _grid(b)
    elif a.kernel != b.kernel and a.kind == "kernel":
        yield "code", full, "", "another source or other constants"
    elif a.kernel != b.kernel:
        yield a.kind, name, a.kernel, b.kernel


def _grid(launch: Launch) -> str:
    return " × ".join(map(str, launch.grid))


def _signature(a: Launch, b: Launch) -> Iterator[tuple[str, str, str]]:
    """Weights read besides, types and scalar values of arguments, stream, dependence."""
    mine, theirs = ({x.name: x for x in (*launch.arguments, *launch.outputs)} for launch in (a, b))
    before, after = (
        listed(sorted(plain_name(x.buffer) for x in args.values() if x.source == "weight"), 9)
        or "none"
        for args in (mine, theirs)
    )
    if before != after:
        yield "weights read", before, after
    common = [name for name in mine if name in theirs]
    for name in common:
        one, other = mine[name], theirs[name]
        if one.dtype != other.dtype:
            yield f"type of {name.removesuffix('_ptr')}", one.dtype, other.dtype
        if one.shape != other.shape:
            shapes = (" × ".join(map(str, x.shape)) or "none" for x in (one, other))
            yield f"shape of {name.removesuffix('_ptr')}", next(shapes), next(shapes)
        if one.value != other.value:
            yield f"value of {name}", f"{one.value}", f"{other.value}"
    if set(mine) != set(theirs) and a.kind != _PACKAGE:
        before, after = (
            listed(sorted(set(x) - set(y)), 9) or "none"
            for x, y in ((mine, theirs), (theirs, mine))
        )
        yield _ARGUMENTS, before, after
    if a.stream != b.stream:
        yield "stream", str(a.stream), str(b.stream)
    if a.dependent != b.dependent:
        words = {True: "starts early", False: "waits"}
        yield "dependent launch", words[a.dependent], words[b.dependent]
