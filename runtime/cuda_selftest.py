"""The self-test of a loaded CUDA artifact: does this GPU compute what was compiled?

In: a session that serves nobody. Out: findings: graphs against the launches they hold, batches
against single sequences, kernels against the reference in the artifact, the engine against single
steps, bytes against the plan. Nothing is changed that later requests would notice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sitsc.core.artifact import Artifact
from sitsc.core.plan import Regime
from sitsc.core.reference import FILE, read_reference
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.selftest_findings import DeviceBytes, Finding, memory_findings
from sitsc.runtime.selftest_reference import (
    Expected,
    Texts,
    choose_lengths,
    expected,
    make_texts,
    row_errors,
)
from sitsc.runtime.selftest_steps import StepRunner, prefill_choice

_OTHERS = 63
_ALLOWED = 3.0
_LEAST = 2e-3
_ENGINE_STEPS, _ENGINE_PROMPTS, _ENGINE_TOKENS = 6, 3, 20
Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Baseline:
    """Bytes in use on the device before anything was loaded."""

    used: int
    reserved: int


def baseline() -> Baseline:
    """Measure what is in use before loading; starts the driver. Call once, before `load`."""
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    free, whole = torch.cuda.mem_get_info()
    return Baseline(whole - free, torch.cuda.memory_reserved())


def run_selftest(
    session: Any, before: Baseline, progress: Progress = lambda share: None
) -> list[Finding]:
    """All checks of a loaded session (`sitsc.runtime.loader.Session`)."""
    artifact: Artifact = session.artifact
    plan = artifact.plan
    runner = StepRunner(session.executor, plan)
    texts = make_texts(plan, choose_lengths(plan))
    runner.fill(texts, range(len(texts.ids)))
    decode = [regime for regime in plan.regimes if regime.kind == "decode"]
    findings: list[Finding] = []
    for index, regime in enumerate(decode):
        progress(0.7 * index / len(decode))
        findings.append(check_graph(runner, regime, texts))
        if plan.numerics.batch_invariant:
            findings.append(check_invariance(runner, regime, texts))
    findings.append(check_engine(session, runner, texts))
    progress(0.7)
    findings += memory_findings(plan.memory, device_bytes(session.executor, before))
    findings += check_kernels(artifact, runner, texts)
    progress(1.0)
    return findings


# --- graphs and batches -------------------------------------------------------------------------


def check_graph(runner: StepRunner, regime: Regime, texts: Texts) -> Finding:
    """Two steps by the graph, two by its launches one by one, and the second from the host."""
    rows = list(range(min(regime.sizes["sequences"], len(texts.ids))))
    count = len(rows)
    first = runner.decode(regime, texts, rows)
    second = runner.again(regime, count)
    eager = runner.decode(regime, texts, rows, graph=False)
    eager_next = runner.again(regime, count, graph=False)
    lengths, tables = [texts.prompts[i] + 1 for i in rows], [texts.tables[i] for i in rows]
    runner.set(regime, first.sampled.tolist(), lengths, tables)
    told = runner.again(regime, count)
    best = first.logits.argmax(-1)
    problems = {
        "logits are not finite": not bool(first.logits.isfinite().all()),
        "the graph gives other bits than its launches": not first.same(eager),
        "its second step gives other bits": not second.same(eager_next),
        "a step does not go on from the one before": not second.same(told),
        "sampled ids are not the best": not torch.equal(first.sampled, best),
    }
    wrong = [what for what, found in problems.items() if found]
    return Finding("graph", regime.name, not wrong, {"rows": count}, "; ".join(wrong))


def check_invariance(runner: StepRunner, regime: Regime, texts: Texts) -> Finding:
    """The first and the last of up to 64 sequences give the same bits alone, in the first row."""
    count = min(regime.sizes["sequences"], len(texts.ids), _OTHERS + 1)
    together = runner.decode(regime, texts, list(range(count)))
    wrong = [
        str(row)
        for row in sorted({0, count // 2, count - 1})
        if not together.rows(row, row + 1).same(runner.decode(regime, texts, [row]))
    ]
    note = f"row {', '.join(wrong)} has other bits among others" if wrong else ""
    return Finding("batch invariance", regime.name, not wrong, {"others": count - 1}, note)


# --- engine -------------------------------------------------------------------------------------


def check_engine(session: Any, runner: StepRunner, texts: Texts) -> Finding:
    """Greedy tokens of the engine are those of the same steps made one by one."""
    count = min(_ENGINE_PROMPTS, len(texts.ids))
    rows = list(range(len(texts.ids) - count, len(texts.ids)))
    prompts = [list(texts.ids[i][: min(texts.prompts[i], _ENGINE_TOKENS)]) for i in rows]
    tables = [texts.tables[i] for i in rows]
    room = min(map(len, tables)) * runner.plan.kv[0].page_tokens - max(map(len, prompts))
    steps = max(1, min(_ENGINE_STEPS, room))
    answers = session.engine.generate_batch(
        prompts, SamplingOptions(max_tokens=steps, ignore_eos=True)
    )
    for answer in answers:
        if answer.error is not None:
            return Finding("engine", "greedy", False, {}, str(answer.error))
    parts = [(ids, 0, table) for ids, table in zip(prompts, tables, strict=True)]
    tokens = [runner.prefill(parts)[1].argmax(-1)]
    regime = runner.executor.decode_regime(count)
    runner.set(regime, tokens[0].tolist(), [len(ids) for ids in prompts], tables)
    tokens += [runner.again(regime, count).sampled for _ in range(steps - 1)]
    single = torch.stack(tokens, 1).tolist()
    wrong = [i for i in range(count) if list(answers[i].token_ids) != single[i]]
    note = f"prompt {wrong[0]} is answered otherwise than step by step" if wrong else ""
    return Finding("engine", "greedy", not wrong, {"prompts": count, "tokens": steps}, note)


# --- memory -------------------------------------------------------------------------------------


def device_bytes(executor: Any, before: Baseline) -> DeviceBytes:
    """What is allocated now, and the most that was since the baseline."""
    memory = executor.memory
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    blocks = {t.untyped_storage().data_ptr(): t for t in memory.weights.values()}
    used = whole - free - before.used
    beside = used - (torch.cuda.memory_reserved() - before.reserved)
    return DeviceBytes(
        weights=sum(t.untyped_storage().nbytes() for t in blocks.values()),
        arena=memory.arena.numel(),
        kv=sum(pool.numel() for pool in memory.pools.values()),
        used=used,
        peak=torch.cuda.max_memory_allocated() + max(0, beside),
    )


# --- kernels ------------------------------------------------------------------------------------


def check_kernels(artifact: Artifact, runner: StepRunner, texts: Texts) -> list[Finding]:
    """Every regime against the reference, so that every kernel of the plan is in a comparison."""
    if not artifact.has(FILE):
        return [Finding("kernels", "all", None, {}, "the artifact holds no reference")]
    reference = read_reference(artifact.json(FILE))
    weights = runner.executor.memory.weights
    try:
        want = expected(runner.plan, reference, weights, texts)
        moved = expected(runner.plan, reference, weights, texts, disturbed=True)
    except torch.OutOfMemoryError:
        return [Finding("kernels", "all", None, {}, "too little memory is free for the reference")]
    allowed = _ALLOWED * float(row_errors(moved.logits, want.logits).max()) + _LEAST
    logits = want.logits.cpu()
    ran: set[str] = set()
    findings = [*_prefills(runner, texts, logits, allowed, ran)]
    runner.fill(texts, range(len(texts.ids)))
    findings += _layers(runner, texts, want, moved)
    for regime in runner.plan.regimes:
        if regime.kind == "decode":
            rows = list(range(min(regime.sizes["sequences"], len(texts.ids))))
            found = runner.decode(regime, texts, rows)
            findings.append(_judged(regime.name, found.logits, logits[rows, 1], allowed))
            ran.add(regime.name)
    missing = [name for name in runner.regimes if name not in ran]
    findings += [Finding("kernels", name, None, {}, "no step was that large") for name in missing]
    return findings


def _judged(
    name: str, value: torch.Tensor, wanted: torch.Tensor, allowed: float, check: str = "kernels"
) -> Finding:
    errors = row_errors(value, wanted)
    worst = float(errors.max())
    figures = {"rows": len(errors), "worst_error": worst, "allowed": allowed}
    note = "" if worst <= allowed else f"relative error {worst:.1e}, {allowed:.1e} is rounding"
    return Finding(check, name, worst <= allowed, figures, note)


def _prefills(
    runner: StepRunner, texts: Texts, logits: torch.Tensor, allowed: float, ran: set[str]
) -> Iterator[Finding]:
    """Each prefill regime with whole prompts, then a chunk beside a decoding sequence."""
    below = 0
    regimes = [r for r in runner.plan.regimes if r.kind == "prefill"]
    for regime in sorted(regimes, key=lambda r: r.sizes["tokens"]):
        most, sequences = regime.sizes["tokens"], regime.sizes["sequences"]
        chosen = prefill_choice(below, most, sequences, texts.prompts)
        below = most
        if chosen:
            parts = [(texts.ids[i][:-1], 0, texts.tables[i]) for i in chosen]
            name, found = runner.prefill(parts)
            ran.add(name)
            yield _judged(name, found, logits[chosen, 0], allowed)
    yield _mixed(runner, texts, logits, allowed)


def _mixed(runner: StepRunner, texts: Texts, logits: torch.Tensor, allowed: float) -> Finding:
    """The second half of the first prompt beside one more token of the last sequence."""
    last, half = len(texts.ids) - 1, max(1, texts.prompts[0] // 2)
    first = texts.ids[0][:-1]
    runner.prefill([(first[:half], 0, texts.tables[0])])
    parts: list[tuple[Sequence[int], int, Sequence[int]]] = []
    rows = []
    if half < len(first):
        parts.append((first[half:], half, texts.tables[0]))
        rows.append((0, 0))
    if last:
        runner.prefill([(texts.ids[last][:-1], 0, texts.tables[last])])
        parts.append((texts.ids[last][-1:], texts.prompts[last], texts.tables[last]))
        rows.append((last, 1))
    if not parts:
        return Finding("kernels", "mixed step", None, {}, "the only prompt has one token")
    name, found = runner.prefill(parts)
    wanted = torch.stack([logits[row] for row in rows])
    return _judged(f"mixed step ({name})", found, wanted, allowed)


def _layers(runner: StepRunner, texts: Texts, want: Expected, moved: Expected) -> Iterator[Finding]:
    """Keys and values in the pools: the first layer that differs is where to look."""
    for group in runner.plan.kv:
        if group.dtype != "bfloat16":
            yield Finding("layers", group.name, None, {}, f"KV is {group.dtype}")
            continue
        shape = (len(group.layers), -1, 2, group.kv_heads, group.page_tokens, group.head_dim)
        pool = runner.executor.memory.pools[group.name].view(torch.bfloat16).view(shape)
        worst, allowed = 0.0, _LEAST
        for place, layer in enumerate(group.layers):
            good = want.keys_values[group.name, place]
            noise = moved.keys_values[group.name, place]
            for index, sides, other in zip(want.kept, good, noise, strict=True):
                count = texts.prompts[index]
                pages = pool[place][torch.tensor(texts.tables[index], device=pool.device)]
                found = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :count]
                for mine, side, disturbed in zip(found, sides, other, strict=True):
                    flat = side.flatten().float()
                    error = float(row_errors(mine.flatten(), flat))
                    limit = _ALLOWED * float(row_errors(disturbed.flatten(), flat)) + _LEAST
                    if error > limit:
                        note = f"layer {layer} is the first that differs: {error:.1e}"
                        yield Finding("layers", group.name, False, {"worst_error": error}, note)
                        return
                    worst, allowed = max((worst, allowed), (error, limit))
        yield Finding("layers", group.name, True, {"worst_error": worst, "allowed": allowed})
