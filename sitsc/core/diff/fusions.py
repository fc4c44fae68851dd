"""Fusions gained and lost: operators by themselves in one plan only; layers no longer alike.

In: two plans of one model. Out: changes by layer, from the operators of the regimes that both have.
The same graph is behind every regime, so that one tells of all.
"""

from collections import Counter
from collections.abc import Iterator

from sitsc.core.diff.change import Change
from sitsc.core.diff.decisions import COLLECTIVES
from sitsc.core.diff.view import Operator, Pair, RegimeView, layer_pairs, listed, regimes, spans
from sitsc.core.plan import Plan

Key = tuple[str, str]
_CHOOSES = ("aten.index",)  # rows are chosen, nothing that a kernel could do by the way


def fusions(a: Plan, b: Plan) -> Iterator[Change]:
    """Operators of each pair of layer classes that come, go, or are cut otherwise."""
    mine, theirs = regimes(a), regimes(b)
    name = next((n for n in mine if n in theirs), None)
    if name is None:
        return
    once = len(a.stages) != len(b.stages)  # what stands outside of layers, each stage repeats
    told: dict[tuple[str, str, str], list[Pair]] = {}
    shares: dict[tuple[str, str, str], float] = {}
    for pair in layer_pairs(a, b):
        before, after = _layer(mine[name], a, pair.a), _layer(theirs[name], b, pair.b)
        if once and not pair.layers:
            before, after = (Counter(dict.fromkeys(found, 1)) for found in (before, after))
        gone, new = before - after, after - before
        if not gone and not new:
            continue
        key = (_title(gone, new), _words(gone), _words(new))
        told.setdefault(key, []).append(pair)
        shares[key] = shares.get(key, 0.0) + max(
            _share(mine[name], pair.a, gone), _share(theirs[name], pair.b, new)
        )
    for key, pairs in told.items():
        title, before, after = key
        yield Change(
            "fusions",
            title,
            _where(pairs),
            before or "inside others",
            after or "inside others",
            shares[key],
        )
    yield from _classes(a, b)


def _classes(a: Plan, b: Plan) -> Iterator[Change]:
    """Which layers are alike; what the classes are called does not count."""
    mine, theirs = (sorted(c.layers for c in plan.model.layer_classes) for plan in (a, b))
    if mine != theirs:
        before, after = ("; ".join(map(spans, layers)) for layers in (mine, theirs))
        yield Change("fusions", "layers that are alike", "", before, after)


def _title(gone: Counter[Key], new: Counter[Key]) -> str:
    if all(op.startswith(_CHOOSES) for _, op in (*gone, *new)):
        return "choice of rows"
    if len(list(gone.elements())) < len(list(new.elements())):
        return "fusion lost"
    return "fusion gained" if len(gone) > len(new) else "operators"


def _layer(view: RegimeView, plan: Plan, layer_class: str) -> Counter[Key]:
    """How often a layer of the class calls each operator, by (module, operator)."""
    layers = sum(len(c.layers) for c in plan.model.layer_classes if c.name == layer_class)
    found: Counter[Key] = Counter()
    for (of, name, op), operator in view.operators.items():
        if of == layer_class and op.rpartition(".")[2] not in COLLECTIVES:
            found[name, op] = max(1, operator.count // max(1, layers))
    return found


def _share(view: RegimeView, layer_class: str, keys: Counter[Key]) -> float:
    whole = view.predicted_us or 1.0
    return sum(view.operators[layer_class, *key].predicted_us for key in keys) / whole


def _words(found: Counter[Key]) -> str:
    """ "rms_norm of input_layernorm, 2 × add of step": modules of one operator together."""
    by_op: dict[str, list[str]] = {}
    for (name, op), count in sorted(found.items()):
        short = op.removeprefix("sitsc.").removeprefix("aten.").removesuffix(".Tensor")
        by_op.setdefault(short, []).append(name if count == 1 else f"{name} × {count}")
    return "; ".join(f"{op} of {listed(names)}" for op, names in sorted(by_op.items()))


def _where(pairs: list[Pair]) -> str:
    layers = [layer for pair in pairs for layer in pair.layers]
    rest = any(not pair.layers for pair in pairs)
    inside = f"layers {spans(layers)}" if layers else ""
    outside = "outside of layers" if rest else ""
    return " and ".join(part for part in (inside, outside) if part)


def alike(a: Plan, b: Plan) -> Iterator[tuple[str, str, Operator, Operator]]:
    """(regime, module, operator of A, of B) of whatever both plans compute as often."""
    mine, theirs = regimes(a), regimes(b)
    for name, view in mine.items():
        other = theirs.get(name)
        if other is None or view.sizes != other.sizes:
            continue
        for (layer_class, module, op), operator in view.operators.items():
            twin = other.operators.get((layer_class, module, op))
            if twin is not None and twin.count == operator.count:
                yield name, f"{module} ({op.rpartition('sitsc.')[2]})", operator, twin
