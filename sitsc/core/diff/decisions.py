"""Decisions that a plan states outright: target, partition, numerics, schedule, KV layout, tiers.

In: two plans. Out: the changes of one section. Order and names inside a section do not count.
"""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from sitsc.core.diff.change import Change
from sitsc.core.diff.view import layer_pairs, listed, programs, regimes, spans
from sitsc.core.plan import KvGroup, Plan

COLLECTIVES = ("all_reduce", "all_gather")


def target(a: Plan, b: Plan) -> Iterator[Change]:
    """What the plan runs on; the ceilings are part of the cost model."""
    for name in ("name", "isa", "threads", "topology", "memory_bytes"):
        title = "target" if name == "name" else f"target's {name}"
        yield from _differs("target", title, getattr(a.target, name), getattr(b.target, name))


def parallel(a: Plan, b: Plan) -> Iterator[Change]:
    """Degrees, stages, ranks, collectives of a layer, and how prompts and messages are cut."""
    degrees = [_degrees(plan) for plan in (a, b)]
    yield from _differs("parallel", "partition", *degrees)
    yield from _differs("parallel", "devices", a.target.device_count, b.target.device_count)
    yield from _differs("parallel", "stages end at layers", *(_stages(p) for p in (a, b)))
    yield from _crossing(a, b)
    yield from _collectives(a, b)
    for name in ("micro_batch", "chunk_tokens"):
        if name == "chunk_tokens" and _same_chunks(a, b):
            continue  # told as the schedule's
        yield from _differs("parallel", name, getattr(a.parallel, name), getattr(b.parallel, name))
    yield from _differs("parallel", "prompts", *(_cuts(p) for p in (a, b)))
    yield from _differs("parallel", "pieces of messages", *(_pieces(p) for p in (a, b)))
    for rank in range(max(a.num_ranks, b.num_ranks) if a.num_ranks == b.num_ranks else 0):
        mine, theirs = a.ranks[rank], b.ranks[rank]
        yield from _differs(
            "parallel",
            f"program and shard of rank {rank}",
            f"{mine.program}, {mine.shard}",
            f"{theirs.program}, {theirs.shard}",
        )
    yield from _alternatives(a, b)


def _degrees(plan: Plan) -> str:
    p = plan.parallel
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    return f"TP {p.tp} PP {p.pp} EP {p.ep} DP {p.dp}, {ranks}"


def _stages(plan: Plan) -> str:
    """The layers after the last one of each stage; nothing of a plan that has no stages."""
    return " ".join(map(str, plan.parallel.stages[1:]))


def _crossing(a: Plan, b: Plan) -> Iterator[Change]:
    """What goes into each stage and out of it, of plans with as many stages."""
    if len(a.stages) == len(b.stages):
        for index, (mine, theirs) in enumerate(zip(a.stages, b.stages, strict=True)):
            for name in ("receives", "sends"):
                before, after = getattr(mine, name), getattr(theirs, name)
                yield from _differs("parallel", name, before, after, f"stage {index}")


def _same_chunks(a: Plan, b: Plan) -> bool:
    return all(p.parallel.chunk_tokens == p.schedule.prefill_chunk_tokens for p in (a, b))


def _cuts(plan: Plan) -> str:
    cuts = (f"to {c.high_tokens} {c.how} {c.chunk_tokens or ''}" for c in plan.parallel.cuts)
    return ", ".join(cut.rstrip() for cut in cuts)


def _pieces(plan: Plan) -> str:
    found = plan.parallel.granularity
    return ", ".join(f"{g.message_bytes} over {g.link} as {g.best_bytes}" for g in found)


def _alternatives(a: Plan, b: Plan) -> Iterator[Change]:
    """Partitions that can be in one plan and cannot in the other."""
    mine, theirs = (
        {(x.tp, x.pp, x.ep, x.dp) for x in plan.parallel.alternatives if x.feasible}
        for plan in (a, b)
    )
    for title, gone in (("no longer possible", mine - theirs), ("now possible", theirs - mine)):
        if gone:
            names = listed(f"TP {t} PP {p} EP {e} DP {d}" for t, p, e, d in sorted(gone))
            yield Change("parallel", f"alternatives {title}", names, "", "")


def _collectives(a: Plan, b: Plan) -> Iterator[Change]:
    """How often a layer, or the rest of a step, exchanges what."""
    mine, theirs = (next(iter(regimes(plan).values()), None) for plan in (a, b))
    if mine is None or theirs is None:
        return
    for pair in layer_pairs(a, b):
        counts: list[dict[str, float]] = []
        for view, name, plan in ((mine, pair.a, a), (theirs, pair.b, b)):
            layers = max(1, sum(len(c.layers) for c in plan.model.layer_classes if c.name == name))
            found: dict[str, float] = {}
            for (layer_class, _, op), operator in view.operators.items():
                kind = op.rpartition(".")[2]
                if layer_class == name and kind in COLLECTIVES:
                    found[kind] = found.get(kind, 0) + operator.count / layers
            counts.append(found)
        for kind in COLLECTIVES:
            where = (
                f"{kind} in layers {spans(pair.layers)}"
                if pair.layers
                else f"{kind} outside of layers"
            )
            before, after = (f"{found.get(kind, 0):g} in each" for found in counts)
            yield from _differs("parallel", "collectives", before, after, where)


def numerics(a: Plan, b: Plan) -> Iterator[Change]:
    """Every dtype and promise about results."""
    for field in fields(a.numerics):
        before, after = (getattr(plan.numerics, field.name) for plan in (a, b))
        yield from _differs("numerics", field.name, before, after)


def schedule(a: Plan, b: Plan) -> Iterator[Change]:
    """Limits that were asked for, then what follows: graph buckets and sizes of a step."""
    yield from _differs("schedule", "max_context", a.tokens.max_context, b.tokens.max_context)
    for name in ("max_batch", "prefill_chunk_tokens"):
        yield from _differs("schedule", name, getattr(a.schedule, name), getattr(b.schedule, name))
    for name in ("decode_buckets", "prefill_buckets"):
        before, after = getattr(a.schedule, name), getattr(b.schedule, name)
        what = [f"{word} {_text(sizes)}" for word, sizes in _moved(before, after)]
        if what:
            title = f"{name.partition('_')[0]} buckets {', '.join(what)}"
            yield Change("schedule", title, "", _text(before), _text(after))
    before, after = (tuple(regimes(plan)) for plan in (a, b))
    if set(before) != set(after) and not _moved(_buckets(a), _buckets(b)):
        yield Change("schedule", "regimes", "", _text(before), _text(after))
    for name in ("max_step_tokens", "num_streams"):
        yield from _differs("schedule", name, getattr(a.schedule, name), getattr(b.schedule, name))


def _buckets(plan: Plan) -> tuple[int, ...]:
    return (*plan.schedule.decode_buckets, *plan.schedule.prefill_buckets)


def _moved(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[str, list[int]]]:
    """What was dropped and what was added, where there is any."""
    found = [("dropped", [n for n in before if n not in after])]
    found += [("added", [n for n in after if n not in before])]
    return [(word, sizes) for word, sizes in found if sizes]


def kv(a: Plan, b: Plan) -> Iterator[Change]:
    """Layout of the KV pools by the layers that they hold."""
    mine, theirs = _pools(a), _pools(b)
    same = sorted(set(mine) & set(theirs))
    found: dict[tuple[str, str, str], list[int]] = {}
    for layer in same:
        for field in fields(KvGroup):
            if field.name in ("name", "layers"):
                continue
            before, after = (_text(getattr(pools[layer], field.name)) for pools in (mine, theirs))
            if field.name == "page_bytes":
                before, after = (_layer_bytes(pools[layer]) for pools in (mine, theirs))
            if before != after:
                found.setdefault((field.name, before, after), []).append(layer)
    for (name, before, after), layers in found.items():
        where = "" if len(layers) == len(same) else f"layers {spans(layers)}"
        title = "page_bytes of a layer" if name == "page_bytes" else name
        yield Change("kv", title, where, before, after)
    yield from _differs("kv", "layers with pages", spans(mine), spans(theirs))
    groups = [_text(sorted(spans(g.layers) for p in programs(x) for g in p.kv)) for x in (a, b)]
    if not found and set(mine) == set(theirs):
        yield from _differs("kv", "groups of layers", *groups)


def _pools(plan: Plan) -> dict[int, KvGroup]:
    return {layer: g for program in programs(plan) for g in program.kv for layer in g.layers}


def _layer_bytes(group: KvGroup) -> str:
    return f"{group.page_bytes / max(1, len(group.layers)):g}"


def memory(a: Plan, b: Plan) -> Iterator[Change]:
    """Where each class of data lies and how it gets there; sizes are figures."""
    mine, theirs = (
        {tier.data: f"{tier.place}, {tier.method}" for tier in plan.memory.tiers} for plan in (a, b)
    )
    for data in sorted(set(mine) | set(theirs)):
        yield from _differs("memory", f"place of {data}", mine.get(data), theirs.get(data))


def _differs(
    section: str, title: str, before: Any, after: Any, where: str = ""
) -> Iterator[Change]:
    if before != after:
        yield Change(section, title.replace("_", " "), where, _text(before), _text(after))


def _text(value: Any) -> str:
    """A value in words; "none" for what is not there."""
    if isinstance(value, (tuple, list)):
        value = " ".join(map(str, value))
    return "none" if value in (None, "") else str(value)
