"""Figures of two plans: predicted times and rates, KV tokens that fit, memory by component.

In: two plans. Out: a `Figure` for each number that both have. Predictions carry the larger of the
two error bars; figures of memory are exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sitsc.core.diff.change import HIGHER, LOWER, Figure
from sitsc.core.diff.view import programs, regimes
from sitsc.core.plan import Plan

GROUPS = {"tpot": "TPOT", "ttft": "TTFT", "plain": "time of a call"}
_MEMORY = ("weights", "kv", "arena", "package", "graph", "slack", "total")


@dataclass(frozen=True, slots=True)
class _Value:
    value: float
    error: float = 0.0


def predicted(a: Plan, b: Plan) -> Iterator[Figure]:
    """TTFT and TPOT of every bucket, throughput, cold start."""
    for name in sorted(set(a.predictions) & set(b.predictions), key=figure_order):
        before, after = a.predictions[name], b.predictions[name]
        if before.unit != after.unit:
            continue  # told as a change of the cost model
        group = GROUPS.get(name.partition("_")[0], name.replace("_", " "))
        error = max(before.error, after.error)
        yield Figure(name, group, before.unit, LOWER, before.value, after.value, error)
    mine, theirs = _throughput(a), _throughput(b)
    if mine is not None and theirs is not None:
        error = max(mine.error, theirs.error)
        yield Figure(
            "throughput", "throughput", "tokens/s", HIGHER, mine.value, theirs.value, error
        )


def figure_order(name: str) -> tuple[int, str, int]:
    """TPOT, TTFT, then the rest; buckets by their size."""
    kind, _, size = name.rpartition("_")
    first = name.partition("_")[0]
    place = {"tpot": 0, "ttft": 1}.get(first, 2)
    return (place, kind, int(size)) if size.isdigit() else (place, name, 0)


def _throughput(plan: Plan) -> _Value | None:
    """Tokens a second of the best decode bucket, all stages at work, all replicas."""
    best, error = 0.0, 0.0
    for name, view in regimes(plan).items():
        if name.startswith("decode_") and view.slowest_us > 0:
            rate = plan.parallel.dp * view.sizes["sequences"] * 1e6 / view.slowest_us
            bar = plan.predictions.get(f"tpot_{name}")
            best, error = max((best, error), (rate, bar.error if bar else 0.0))
    return _Value(float(f"{best:.6g}"), error) if best else None


def sizes(a: Plan, b: Plan) -> Iterator[Figure]:
    """KV tokens that fit, and bytes of one device, the fullest."""
    if a.kind == b.kind == "decoder":
        before, after = _kv_tokens(a), _kv_tokens(b)
        yield Figure("kv_tokens", "KV tokens", "tokens", HIGHER, before, after)
    for name in _MEMORY:
        before, after = (float(getattr(plan.memory, f"{name}_bytes")) for plan in (a, b))
        yield Figure(f"memory.{name}", "memory", "bytes", LOWER, before, after)


def _kv_tokens(plan: Plan) -> float:
    """What the stage with the least room holds, of all replicas."""
    found = []
    for program in programs(plan):
        tokens = min((group.page_tokens for group in program.kv), default=0)
        if program.kv:
            found.append(program.memory.kv_pages * tokens)
    return float(plan.parallel.dp * min(found, default=0))
