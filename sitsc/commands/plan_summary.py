"""What a golden plan says, as text that Git can compare: one fact a line, alike on every machine.

In: a plan. Out: lines. A launch stands once for all buckets in which it is alike. Without the
digests of kernels: that something else runs is told by `runs`, and what by `sitsc plan diff`.
"""

from collections.abc import Iterator

from sitsc.core.diff.figures import figure_order
from sitsc.core.diff.kernels import launch_name, what_runs
from sitsc.core.diff.view import REST, programs, regimes, spans
from sitsc.core.plan import UNMATCHED, Launch, Plan

_MEMORY = ("weights", "kv", "arena", "package", "graph", "slack", "total")
_OUTSIDE = "outside of layers"


def summary_lines(name: str, plan: Plan) -> list[str]:
    """The whole text, without a date or a place."""
    sections = (_facts(plan), _launches(plan), _memory(plan), _predictions(plan))
    lines = [name, *(line for section in sections for line in ("", *section))]
    return [*lines, "", f"runs {plan.runs()}"]


def _facts(plan: Plan) -> Iterator[str]:
    model, parallel, numerics, schedule = plan.model, plan.parallel, plan.numerics, plan.schedule
    yield f"model {model.architecture}"
    for layers in model.layer_classes:
        yield f"{layers.name}: layers {spans(layers.layers)}"
    yield f"target {plan.target.name} {plan.target.isa}, devices {plan.target.device_count}"
    yield (
        f"TP {parallel.tp} PP {parallel.pp} EP {parallel.ep} DP {parallel.dp},"
        f" micro-batches {parallel.micro_batch}, chunks of {parallel.chunk_tokens} tokens"
    )
    for stage in plan.stages:
        yield f"stage of layers {stage.layers[0]}-{stage.layers[1] - 1}"
    yield (
        f"dtype {numerics.dtype}, weights {numerics.weights}, KV {numerics.kv_dtype}, changed by"
        f" {', '.join(numerics.changing_passes) or 'no pass'}"
    )
    yield f"decode buckets {_spaced(schedule.decode_buckets)}"
    yield f"prefill buckets {_spaced(schedule.prefill_buckets)}"
    yield (
        f"at most {schedule.max_batch} sequences, {schedule.max_step_tokens} tokens a step,"
        f" context {plan.tokens.max_context}"
    )


def _spaced(numbers: tuple[int, ...]) -> str:
    return " ".join(map(str, numbers))


def _launches(plan: Plan) -> Iterator[str]:
    """What is launched in which layers, each line with the buckets in which it is so."""
    views = regimes(plan)
    packaged = any(part.packages for part in (plan, *plan.stages))  # then no launch tells it
    buckets: dict[tuple[str, str], list[str]] = {}  # by layer class and text
    for name, view in views.items():
        for layers in plan.model.layer_classes:
            for text in _described(view.in_layer.get(layers.layers[0], ())):
                buckets.setdefault((layers.name, text), []).append(name)
        for text in _described(tuple(view.rest)):
            buckets.setdefault((REST, text), []).append(name)
        for (layer_class, name_of, op), operator in view.operators.items():
            if packaged or operator.by.startswith(UNMATCHED):
                text = f"{name_of} {op}: {operator.by}"
                buckets.setdefault((layer_class, text), []).append(name)
    classes: dict[tuple[str, str], list[str]] = {}  # by text and buckets
    for (layer_class, text), names in buckets.items():
        where = "all" if len(names) == len(views) else " ".join(names)
        classes.setdefault((text, where), []).append(layer_class)
    places: dict[str, list[str]] = {}
    for (text, where), names in classes.items():
        places.setdefault(_place(plan, names), []).append(f"  {text} | {where}")
    for place in sorted(places, key=lambda place: place == _OUTSIDE):
        yield from (f"{place}:", *places[place])


def _place(plan: Plan, names: list[str]) -> str:
    """The layers of these classes, and whether it is outside of layers too."""
    layers = [layer for c in plan.model.layer_classes if c.name in names for layer in c.layers]
    parts = [f"layers {spans(layers)}"] if layers else []
    return " and ".join([*parts, *([_OUTSIDE] if REST in names else [])])


def _described(launches: tuple[Launch, ...]) -> Iterator[str]:
    """Each launch once, with how often it is there."""
    texts = [_described_one(launch) for launch in launches]
    for text in dict.fromkeys(texts):
        yield text + (f" × {texts.count(text)}" if texts.count(text) > 1 else "")


def _described_one(launch: Launch) -> str:
    name, what = launch_name(launch), what_runs(launch)
    tile = " ".join(f"{key} {value}" for key, value in sorted(launch.tile.items()))
    return " ".join(part for part in (name, what if what != name else "", tile) if part)


def _memory(plan: Plan) -> Iterator[str]:
    for name in _MEMORY:
        yield f"memory.{name} {getattr(plan.memory, f'{name}_bytes')}"
    for index, program in enumerate(programs(plan)):
        for group in program.kv:
            yield (
                f"kv of stage {index}: layers {spans(group.layers)}, {group.kv_heads} heads of"
                f" {group.head_dim}, {group.dtype}, window {group.window or 'all'},"
                f" {program.memory.kv_pages} pages of {group.page_tokens} tokens"
            )


def _predictions(plan: Plan) -> Iterator[str]:
    for name in sorted(plan.predictions, key=figure_order):
        found = plan.predictions[name]
        yield f"{name} {found.value:.4g} {found.unit} ± {100 * found.error:.3g} %"
