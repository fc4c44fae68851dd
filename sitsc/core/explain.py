"""Why a plan is as it is: which pass decided, from which numbers, and what would change it.

In: a plan, its graph (`reference.json`) where there is one, and a module path or a topic. Out:
facts. Everything is read: from the plan, the graph, and the target's tile table with its evidence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sitsc.core import ops  # noqa: F401  (registers what the graph calls)
from sitsc.core.errors import OptionError
from sitsc.core.layer_names import name_in_layer
from sitsc.core.plan import Alternative, Launch, LaunchGroup, Parallel, Plan, Regime
from sitsc.core.reference import Reference, operator_of
from sitsc.core.tiles import TileEntry, TileTable, load_table
from sitsc.core.weight_spec import WeightSpec

TOPICS = ("partition", "prefill", "buckets", "memory", "numerics")
_ALIASES = {"tp": "partition", "pp": "partition", "ep": "partition", "dp": "partition"}
_ALIASES |= {"chunk": "prefill", "cuts": "prefill", "kv": "memory", "dtype": "numerics"}
_MOST = 3
_LIBRARY = "library"
_TUNED = ("gemv", "skinny", "wide", "attention_decode")  # templates that sitsc tune tries tiles of


@dataclass(frozen=True, slots=True)
class Fact:
    """A decision: what it is, who made it, from what, and what would change it ("": nothing)."""

    what: str
    by: str
    why: str
    change: str = ""


# --- topics -----------------------------------------------------------------------------------


def topic_of(name: str) -> str:
    """The topic that a word means. Raises OptionError naming those known."""
    found = _ALIASES.get(name, name)
    if found not in TOPICS:
        known = ", ".join((*TOPICS, *sorted(_ALIASES)))
        raise OptionError(f"--why {name!r} is no topic", hint=f"one of: {known}")
    return found


def why(plan: Plan, topic: str) -> list[Fact]:
    """The facts of a topic."""
    made = {
        "partition": _partition,
        "prefill": _prefill,
        "buckets": _buckets,
        "memory": _memory,
        "numerics": _numerics,
    }
    return list(made[topic](plan))


def _partition(plan: Plan) -> Iterator[Fact]:
    p = plan.parallel
    what = f"TP {p.tp} × PP {p.pp} × EP {p.ep}, {plan.num_ranks} ranks"
    if not p.alternatives:
        yield Fact(
            what,
            "compile options",
            "one device, or no other partition was looked at",
            "--target NAME:N lets the cost model choose",
        )
        return
    possible = [a for a in p.alternatives if a.feasible]
    yield Fact(
        what,
        "passes/partition.py",
        f"asked for, or first by tokens a second within the limits of those that take all "
        f"devices; predicted {_predicted(plan)}",
        f"--tp, --pp and --ep; {_overtake(possible)}",
    )
    for other in possible[:_MOST]:
        yield Fact(
            f"not {_degrees(other)}",
            "passes/partition.py",
            f"{_passed_over(other)}: TTFT {other.ttft_ms:.4g} ms, TPOT {other.tpot_ms:.4g} ms, "
            f"{other.tokens_per_s:.5g} tokens/s, {other.kv_tokens} KV tokens",
        )
    for other in [a for a in p.alternatives if not a.feasible][:_MOST]:
        yield Fact(f"not {_degrees(other)}", "constraint", other.reason, other.change)
    if len(p.stages) > 2:
        yield Fact(
            f"stages from layers {' '.join(map(str, p.stages[:-1]))}",
            "passes/stage_search.py",
            "about equal predicted time each",
        )


def _passed_over(other: Alternative) -> str:
    """Why a possible one was not taken."""
    if other.dp > 1:
        return f"{other.dp} replicas would be artifacts of their own"
    return other.reason


def _predicted(plan: Plan) -> str:
    """What the plan itself predicts, from the least to the most: "TPOT 2.1 to 2.5 ms, …"."""
    found = []
    for name in ("tpot", "ttft"):
        ms = [p.value for key, p in plan.predictions.items() if key.startswith(name)]
        found += [f"{name.upper()} {min(ms):.4g} to {max(ms):.4g} ms"] if ms else []
    return ", ".join(found)


def _overtake(possible: Sequence[Alternative]) -> str:
    if not possible:
        return "more devices: nothing else is possible on these"
    fastest = min(possible, key=lambda a: a.tpot_ms)
    return f"--slo or --workload; of the others {_degrees(fastest)} has the least TPOT"


def _degrees(p: "Alternative | Parallel") -> str:
    return f"TP {p.tp} × PP {p.pp} × EP {p.ep} × DP {p.dp}"


def _prefill(plan: Plan) -> Iterator[Fact]:
    p, schedule = plan.parallel, plan.schedule
    yield Fact(
        f"at most {schedule.prefill_chunk_tokens} tokens of a prompt in a step",
        "--prefill-chunk-tokens",
        "more make prompts faster and steps beside them longer",
        "--prefill-chunk-tokens",
    )
    for cut in p.cuts:
        chunk = f" in chunks of {cut.chunk_tokens}" if cut.chunk_tokens else ""
        yield Fact(
            f"prompts of {cut.low_tokens} to {cut.high_tokens}: {cut.how}{chunk}",
            "passes/prefill_cuts.py",
            f"TTFT up to {cut.ttft_ms:.4g} ms, least of all cuts that fit a step",
            "--prefill-chunk-tokens, another --target, --tp or --pp",
        )
    for g in p.granularity:
        yield Fact(
            f"messages over {g.link} in pieces of {g.best_bytes} bytes",
            "passes/granularity.py",
            f"best of {g.low_bytes} to {g.high_bytes} for {g.message_bytes} bytes "
            f"between {g.ranks} ranks",
            "sitsc tune links measures the link",
        )


def _buckets(plan: Plan) -> Iterator[Fact]:
    s = plan.schedule
    yield Fact(
        f"decode {' '.join(map(str, s.decode_buckets))}",
        "planner",
        "a CUDA graph each" if plan.target.isa.startswith("sm_") else "what a step costs",
        "--max-batch",
    )
    yield Fact(
        f"prefill {' '.join(map(str, s.prefill_buckets))}",
        "planner",
        "the last holds a whole chunk beside a full batch",
        "--prefill-chunk-tokens, --max-batch",
    )


def _memory(plan: Plan) -> Iterator[Fact]:
    m, own = plan.memory, plan.of_rank(0)
    changes = {
        "weights": "--weights int8 (CPU), --tp or --pp",
        "kv": "--kv-tokens, --kv-dtype",
        "arena": "--prefill-chunk-tokens, --max-batch",
        "graph": "--max-batch",
    }
    sizes = {"weights": m.weights_bytes, "kv": m.kv_bytes, "arena": m.arena_bytes}
    sizes |= {"graph": m.graph_bytes, "package": m.package_bytes, "slack": m.slack_bytes}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size:
            share = f"{100 * size / m.total_bytes:.1f} % of {m.total_bytes} bytes"
            yield Fact(f"{name} {size} bytes", "passes/memory.py", share, changes.get(name, ""))
    tokens = own.memory.kv_pages * own.kv[0].page_tokens if own.kv else 0
    yield Fact(
        f"{tokens} KV tokens",
        "--kv-tokens",
        "two full contexts unless asked otherwise",
        "--kv-tokens",
    )


def _numerics(plan: Plan) -> Iterator[Fact]:
    n = plan.numerics
    yield Fact(
        f"computes in {n.dtype}, keys and values in {n.kv_dtype}, sums in {n.accumulate}",
        "compile options",
        "auto follows the checkpoint's dtype",
        "--dtype, --kv-dtype",
    )
    yield Fact(f"weights: {n.weights}", "compile options", "none: as they are stored", "--weights")
    for name in n.changing_passes:
        yield Fact(
            f"{name} changes results",
            "the passes of the target",
            "rounds otherwise than the checkpoint's own code",
            "--residual" if name == "widen_residual" else "",
        )
    said = f"alike whatever is computed beside a sequence, within {n.invariant_within}"
    yield Fact("batch-invariant" if n.batch_invariant else "not batch-invariant", "planner", said)


# --- operators --------------------------------------------------------------------------------


def operator_facts(plan: Plan, reference: Reference | None, path: str) -> list[Fact]:
    """The facts of the operators of a module. Raises OptionError for a path without any."""
    weights = {w.name: w for program in _programs(plan) for w in program.model.parameters}
    under = [name for name in weights if _inside(name, path)]
    called = list(_calls(reference, path)) if reference is not None else []
    launches = list(_launches(plan, path))
    if not under and not called and not launches:
        near = sorted({_module(name) for name in weights})
        hint = f"such as {near[0]}" if near else "see sitsc plan show"
        raise OptionError(f"nothing of the plan is inside {path!r}", hint=hint)
    facts = [fact for name in under for fact in _weight_facts(weights[name])]
    facts += [fact for values in called for fact in _fusion_facts(values)]
    return facts + _launch_facts(plan, weights, launches)


def _programs(plan: Plan) -> list[Plan]:
    """The plan of the first rank of each stage."""
    tp = plan.parallel.tp
    return [plan.of_rank(stage * tp) for stage in range(len(plan.stages))] or [plan]


def _inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.") or name.startswith(f"{path}+")


def _module(name: str) -> str:
    return name.rsplit(".", 1)[0]


def _weight_facts(spec: WeightSpec) -> Iterator[Fact]:
    parts = _module(spec.name).rsplit(".", 1)[-1].split("+")
    if len(parts) > 1:
        yield Fact(
            f"{' and '.join(parts)} are one matrix {list(spec.shape)}",
            "passes/merge_linears.py",
            "they read the same value: one kernel reads it once",
        )
    if spec.format != "plain":
        yield Fact(
            f"{spec.name} is kept as {spec.format}",
            "passes of the target",
            "the order in which its kernel reads",
            "--weights",
        )


def _calls(reference: Reference, path: str) -> Iterator[dict[str, Any]]:
    """Arguments by name of the linear layers inside a module."""
    for name, arguments, keywords in reference.calls:
        if not name.startswith("sitsc.fused_linear"):
            continue
        names = [a.name for a in operator_of(name)._schema.arguments]  # type: ignore[attr-defined]
        values = dict(zip(names, arguments, strict=False)) | keywords
        weight = values.get("weight")
        if isinstance(weight, dict) and _inside(str(weight.get("weight")), path):
            yield values


def _fusion_facts(values: dict[str, Any]) -> Iterator[Fact]:
    what = _module(values["weight"]["weight"])
    if values["prologue"] == "rms_norm":
        yield Fact(
            f"{what}: the norm before it is part of it",
            "passes/fuse_norm.py",
            "nothing else reads the norm's result",
        )
    if values["epilogue"] == "glu":
        yield Fact(
            f"{what}: {values['activation']} and product of gate and up are part of it",
            "passes/fuse_glu.py",
            "both halves are at hand where the kernel ends",
        )
    if values["epilogue"] == "residual":
        yield Fact(
            f"{what}: adds to the residual stream itself",
            "passes/fuse_residual.py",
            "nothing else reads its result",
        )


def _launches(plan: Plan, path: str) -> Iterator[tuple[Regime, Launch, str]]:
    """Launches that read a weight of a module (its name follows), or are its attention."""
    attends = path.rsplit(".", 1)[-1] in ("self_attn", "attn", "attention")
    for program in _programs(plan):
        for regime in program.regimes:
            for group in regime.groups:
                for launch in group.launches:
                    name = _read_by(launch, group, path)
                    own = attends and launch.template.startswith("attention")
                    if name or (own and _layer_of(path) in group.layers):
                        yield regime, launch, name


def _read_by(launch: Launch, group: LaunchGroup, path: str) -> str:
    for argument in launch.arguments:
        if argument.source == "weight":
            for layer in group.layers or (None,):
                name = name_in_layer(argument.buffer, layer)
                if _inside(name, path):
                    return name
    return ""


def _layer_of(path: str) -> int | None:
    numbers = [int(part) for part in path.split(".") if part.isdecimal()]
    return numbers[0] if numbers else None


def _launch_facts(
    plan: Plan, weights: dict[str, WeightSpec], launches: list[tuple[Regime, Launch, str]]
) -> list[Fact]:
    """A fact for each kernel and tile, with all regimes that launch it."""
    table, target = load_table(plan.target.name), plan.target.name
    regimes: dict[tuple[str, str, str, str], list[str]] = {}
    for regime, launch, name in launches:
        tile = " ".join(f"{k}={v}" for k, v in launch.tile.items())
        kernel = f"{launch.template or f'{launch.kind} {launch.kernel}'} {tile}".strip()
        what = f"{_module(name) if name else 'attention'}: {kernel}"
        evidence = _evidence(table, weights.get(name), launch, regime)
        if launch.kind == "package":
            key = (what, "AOTInductor", "one package with free sizes computes every step", "")
        elif launch.kind != _LIBRARY and not launch.template.startswith(_TUNED):
            why = "chosen for these sizes" if tile else "the kernel that there is for it"
            key = (what, f"codegen/templates/cuda_{launch.template}.py.j2", why, "")
        elif evidence is None:
            why = "nobody measured this kernel for these sizes"
            key = (what, "the rule of core/tiles.py", why, "sitsc tune build, sitsc tune run")
        else:
            source = f"data/tiles/{target}.json"
            key = (what, source, _measured(evidence), "sitsc tune run with other candidates")
        regimes.setdefault(key, []).append(
            f"{regime.name} ({launch.predicted_us:.1f} µs, {launch.bytes} bytes predicted)"
        )
    return [
        Fact(what, by, f"{reason}; {', '.join(dict.fromkeys(where))}", change)
        for (what, by, reason, change), where in regimes.items()
    ]


def _measured(evidence: dict[str, Any]) -> str:
    us = ", ".join(f"{us} µs at context {c}" for c, us in (evidence.get("us") or {}).items())
    text = f"measured {evidence.get('date', '')} on {evidence.get('gpu', '')}: {us or 'the step'}"
    if factor := evidence.get("library"):
        text += f"; with the library's product the step takes {factor:.3f} times as long"
    return text


def _evidence(
    table: TileTable, spec: WeightSpec | None, launch: Launch, regime: Regime
) -> dict[str, Any] | None:
    if launch.template.startswith("attention_decode"):
        return _attention_entry(table, launch, regime.sizes["sequences"])
    if spec is None or regime.kind != "decode":
        return None
    return _entry(table, spec, launch, regime.sizes["tokens"])


def _entry(
    table: TileTable, spec: WeightSpec, launch: Launch, tokens: int
) -> dict[str, Any] | None:
    """The evidence of the entry that a linear layer's launch follows."""

    def follows(entry: TileEntry) -> bool:
        rows = entry.rows * (2 if entry.epilogue == "glu" else 1)
        same = (rows, entry.columns) == tuple(spec.shape) and entry.low <= tokens <= entry.high
        if entry.kernel == _LIBRARY or launch.kind == _LIBRARY:
            return same and entry.kernel == _LIBRARY and launch.kind == _LIBRARY
        return same and entry.tile.items() <= launch.tile.items()

    return next((e.evidence for e in table.linear if follows(e)), None)


def _attention_entry(table: TileTable, launch: Launch, sequences: int) -> dict[str, Any] | None:
    fits = (e for e in table.attention if e.low <= sequences <= e.high and e.tile == launch.tile)
    return next((e.evidence for e in fits), None)
