"""A plan for people: facts, one table of kernels a regime, memory, KV groups and predictions.

In: a plan and the names of regimes. Out: lines of plain text, each as long as it needs.
"""

from collections.abc import Iterator, Sequence

from sitsc.commands.output import bytes_text, table_lines
from sitsc.commands.parallel_view import parallel_lines
from sitsc.commands.plan_rows import kernel_lines
from sitsc.core.errors import OptionError
from sitsc.core.plan import PLAIN, UNMATCHED, Argument, Plan, Regime

_LABEL_WIDTH = 10


def plan_lines(plan: Plan, regimes: Sequence[str] = ()) -> list[str]:
    """The text of a plan; by default with decode at batch 1 and the largest prefill, or the only
    regime of a plain one.
    """
    plain = plan.kind == PLAIN
    sections = [_labelled(fact_rows(plan))]
    if partition := parallel_lines(plan.parallel):
        sections.append(partition)
    sections += [_stages(plan)] if plan.stages else []
    for stage, own in _programs(plan).items():
        sections += [_regime(regime, stage) for regime in choose(own, regimes)]
    sections += [_memory(plan), *([] if plain else [_kv(plan)]), _predictions(plan)]
    sections += [_labelled([("plan", plan.sha256()), ("runs", plan.runs())])]
    return [line for section in sections for line in ("", *section)][1:]


def _programs(plan: Plan) -> dict[str, Plan]:
    """The plan of each stage, by what its regimes are shown under; "" where there is one."""
    firsts = {rank.program: rank.rank for rank in reversed(plan.ranks)}
    several = len(plan.stages) > 1
    return {
        f"stage {stage} " * several: plan.of_rank(rank) for stage, rank in sorted(firsts.items())
    }


def fact_rows(plan: Plan) -> list[tuple[str, str]]:
    """What a plan is of and for, each fact under its label."""
    return _plain_facts(plan) if plan.kind == PLAIN else _facts(plan)


def _stages(plan: Plan) -> list[str]:
    """What each stage holds, and what the ranks of it read and keep."""
    lines = ["stage  layers  ranks  weights a rank  KV a rank  sends"]
    for index, stage in enumerate(plan.stages):
        ranks = [r.rank for r in plan.ranks if r.program == index]
        span = f"{stage.layers[0]}-{stage.layers[1] - 1}"
        place = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
        memory = stage.memory
        lines.append(
            f"{index:5}  {span:>6}  {place:>5}  {bytes_text(memory.weights_bytes):>14}"
            f"  {bytes_text(memory.kv_bytes):>9}  {', '.join(stage.sends) or 'logits'}"
        )
    return lines


def choose(plan: Plan, names: Sequence[str]) -> list[Regime]:
    """The regimes called `names`. Raises OptionError listing those there are."""
    known = {regime.name: regime for regime in plan.regimes}
    if not names and plan.kind == PLAIN:
        return list(plan.regimes)
    if not names:
        prefill = [r for r in plan.regimes if r.kind == "prefill"]
        largest = max(prefill, key=lambda r: r.sizes["tokens"], default=None)
        found = [known.get("decode_1"), largest]
        return [regime for regime in found if regime is not None]
    for name in names:
        if name not in known:
            raise OptionError(f"no regime {name!r} in this plan", hint=f"one of {', '.join(known)}")
    return [known[name] for name in names]


def _labelled(facts: Sequence[tuple[str, str]]) -> list[str]:
    return [label.ljust(_LABEL_WIDTH) + text for label, text in facts]


def _facts(plan: Plan) -> list[tuple[str, str]]:
    model, parallel, numerics, schedule = plan.model, plan.parallel, plan.numerics, plan.schedule
    size = model.dimensions
    shape = [
        f"{label} {size[key]}"
        for label, key in (
            ("layers", "num_hidden_layers"),
            ("hidden", "hidden_size"),
            ("heads", "num_attention_heads"),
            ("KV heads", "num_key_value_heads"),
            ("intermediate", "intermediate_size"),
        )
        if key in size
    ]
    shape += [f"vocabulary {plan.tokens.vocab_size}", f"context {plan.tokens.max_context}"]
    classes = [
        f"{c.name} × {len(c.layers)} (layers {ranges(c.layers)})" for c in model.layer_classes
    ]
    invariant = "not batch-invariant"
    if numerics.batch_invariant:
        invariant = f"batch-invariant within {numerics.invariant_within}"
    steps = f"at most {schedule.max_batch} sequences and {schedule.max_step_tokens} tokens a step"
    threads = f"{plan.target.threads} threads" if plan.target.threads else "threads as the machine"
    split = f"TP {parallel.tp} × PP {parallel.pp} × EP {parallel.ep} × DP {parallel.dp}"
    alternatives = f"{len(parallel.alternatives) or 'no'} alternatives considered"
    changing = ", ".join(numerics.changing_passes) or "no pass"
    return [
        ("model", f"{model.architecture}: {', '.join(shape)}"),
        ("layers", "; ".join(classes)),
        ("target", f"{_devices(plan)}, {threads}"),
        (
            "parallel",
            f"{split}, micro-batch {parallel.micro_batch}, chunks of {parallel.chunk_tokens}"
            f" tokens, ranks {len(plan.ranks)}; {alternatives}",
        ),
        (
            "numerics",
            f"{numerics.dtype}, weights {numerics.weights}, KV {numerics.kv_dtype}, accumulation"
            f" {numerics.accumulate}, {invariant}, changed by {changing}",
        ),
        (
            "buckets",
            f"decode {spaced(schedule.decode_buckets)},"
            f" prefill {spaced(schedule.prefill_buckets)}; {steps}",
        ),
        *_packages(plan),
        *_unmatched(plan),
    ]


def _devices(plan: Plan) -> str:
    target, count = plan.target, plan.num_ranks
    if count > 1:
        return f"{count} × {target.name}, {target.isa}"
    return f"{target.name}, {target.isa}, {target.topology}"


def _packages(plan: Plan) -> list[tuple[str, str]]:
    """A line where there are packages: GPUs have none."""
    named = ", ".join(f"{p.name} ({p.file})" for p in plan.packages)
    return [("packages", named)] if named else []


def _unmatched(plan: Plan) -> list[tuple[str, str]]:
    """A line for each kind of layer that runs as operators of aten, and in which layers."""
    found: dict[str, dict[str, None]] = {}
    for row in (row for regime in plan.regimes[:1] for row in regime.kernels):
        word, _, kind = row.by.partition(" ")
        if word == UNMATCHED:
            layers = f" of {row.layer_class}" if row.layer_class else ""
            place = f"{row.name}{layers} ({row.op} × {row.count})"
            found.setdefault(kind, {})[place] = None
    return [
        (UNMATCHED, f"{kind}, slower than by a kernel: {', '.join(places)}")
        for kind, places in sorted(found.items())
    ]


def _plain_facts(plan: Plan) -> list[tuple[str, str]]:
    """What a plain function takes and gives."""
    launch, numerics = plan.regimes[0].groups[0].launches[0], plan.numerics
    threads = f"{plan.target.threads} threads" if plan.target.threads else "threads as the machine"
    bounds = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in plan.model.dimensions.items())
    return [
        ("model", f"{plan.model.architecture}: a plain function, no KV and no scheduler"),
        *(("input", _signature(argument)) for argument in launch.arguments),
        *(("output", _signature(argument)) for argument in launch.outputs),
        ("sizes", bounds or "none is free"),
        ("target", f"{plan.target.name}, {plan.target.isa}, {plan.target.topology}, {threads}"),
        ("numerics", f"{numerics.dtype}, accumulation {numerics.accumulate}"),
        *_packages(plan),
        *_unmatched(plan),
    ]


def _signature(argument: Argument) -> str:
    return f"{argument.name}: {argument.dtype} [{', '.join(map(str, argument.shape))}]"


def spaced(values: Sequence[int]) -> str:
    """Numbers with blanks between."""
    return " ".join(map(str, values)) or "none"


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges, both ends included: 0-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _regime(regime: Regime, stage: str = "") -> list[str]:
    sizes = regime.sizes
    launches = ", ".join(_launched(regime))
    what = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "fixed sizes"
    if regime.kind != PLAIN:
        what = f"{sizes['sequences']} sequences, {sizes['tokens']} new tokens"
        what += f", {sizes['context']} before"
    title = f"{stage}{regime.name}: {what}; launches {launches}"
    return [title, *kernel_lines(regime)]


def _launched(regime: Regime) -> Iterator[str]:
    """What a regime launches: packages by name, kernels by template and how often."""
    counts: dict[str, int] = {}
    for group in regime.groups:
        for launch in group.launches:
            own = launch.template if launch.kind == "kernel" else ""
            name = own or f"{launch.kind} {launch.kernel}"
            counts[name] = counts.get(name, 0) + max(1, len(group.layers))
    for name, count in counts.items():
        yield f"{name} × {count}" if count > 1 else name


def _memory(plan: Plan) -> list[str]:
    memory = plan.memory
    places = {tier.data: f"{tier.place}: {tier.method}" for tier in memory.tiers}
    sizes = (
        ("weights", memory.weights_bytes),
        ("kv", memory.kv_bytes),
        ("arena", memory.arena_bytes),
        ("inside packages", memory.package_bytes),
        ("graphs", memory.graph_bytes),
        ("slack", memory.slack_bytes),
        ("together", memory.total_bytes),
    )
    rows = [(name, places.get(name, ""), bytes_text(n), str(n)) for name, n in sizes]
    return table_lines([("memory of one device", "", "", "bytes"), *rows], left=2)


def _kv(plan: Plan) -> list[str]:
    header = ("KV group", "layers", "layout", "dtype", "heads", "head dim", "tokens a page")
    rows = [
        (
            group.name,
            ranges(group.layers),
            group.layout,
            group.dtype,
            str(group.kv_heads),
            str(group.head_dim),
            str(group.page_tokens),
            str(group.page_bytes),
            str(own.memory.kv_pages),
            str(group.window or "all"),
        )
        for own in _programs(plan).values()
        for group in own.kv
    ]
    return table_lines([(*header, "page bytes", "pages", "window"), *rows], left=4)


def _predictions(plan: Plan) -> list[str]:
    rows = [
        (name, f"{item.value:.4g}", item.unit, f"± {100 * item.error:.0f} %")
        for name, item in sorted(plan.predictions.items())
    ]
    return table_lines([("prediction", "", "", "error"), *rows])
