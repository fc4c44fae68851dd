"""The self-test of a loaded CUDA artifact: does this GPU compute what was compiled?

In: a session that serves nobody. Out: findings: graphs against the launches they hold, batches
against single sequences, kernels against the reference in the artifact, the engine against single
steps, bytes against the plan. Nothing is changed that later requests would notice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sitsc.core.artifact import Artifact
from sitsc.core.plan import Regime
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.selftest_findings import DeviceBytes, Finding, memory_findings
from sitsc.runtime.selftest_kernels import check_kernels
from sitsc.runtime.selftest_reference import Texts, choose_lengths, make_texts
from sitsc.runtime.selftest_steps import StepRunner

_OTHERS = 63
_ONE = 1e-6  # top_p that keeps one candidate, the lowest of the best
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
    """Two steps by the graphs, two by the launches one by one, and the second from the host."""
    rows = list(range(min(regime.sizes["sequences"], len(texts.ids))))
    count = len(rows)
    first = runner.decode(regime, texts, rows)
    second = runner.again(regime, count)
    eager = runner.decode(regime, texts, rows, graph=False)
    eager_next = runner.again(regime, count, graph=False)
    drawing = runner.decode(regime, texts, rows, draws=True)
    drawing_next = runner.again(regime, count, draws=True)
    lengths, tables = [texts.prompts[i] + 1 for i in rows], [texts.tables[i] for i in rows]
    runner.set(regime, first.sampled.tolist(), lengths, tables)
    told = runner.again(regime, count)
    best = first.logits.argmax(-1)
    problems = {
        "logits are not finite": not bool(first.logits.isfinite().all()),
        "the graph gives other bits than its launches": not first.same(eager),
        "its second step gives other bits": not second.same(eager_next),
        "the graph that draws gives other bits": not drawing.same(eager),
        "its second step does so": not drawing_next.same(eager_next),
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
    """Tokens of the engine are those of the same steps made one by one.

    Greedy ones, and those drawn from the single best candidate.
    """
    count = min(_ENGINE_PROMPTS, len(texts.ids))
    rows = list(range(len(texts.ids) - count, len(texts.ids)))
    prompts = [list(texts.ids[i][: min(texts.prompts[i], _ENGINE_TOKENS)]) for i in rows]
    tables = [texts.tables[i] for i in rows]
    room = min(map(len, tables)) * runner.plan.kv[0].page_tokens - max(map(len, prompts))
    steps = max(1, min(_ENGINE_STEPS, room))
    greedy = SamplingOptions(max_tokens=steps, ignore_eos=True)
    drawn = replace(greedy, temperature=1.0, top_p=_ONE)
    answers = {
        name: session.engine.generate_batch(prompts, options)
        for name, options in (("greedy", greedy), ("drawn", drawn))
    }
    for name, some in answers.items():
        for answer in some:
            if answer.error is not None:
                return Finding("engine", name, False, {}, str(answer.error))
    parts = [(ids, 0, table) for ids, table in zip(prompts, tables, strict=True)]
    tokens = [runner.prefill(parts)[1].argmax(-1)]
    regime = runner.executor.decode_regime(count)
    runner.set(regime, tokens[0].tolist(), [len(ids) for ids in prompts], tables)
    tokens += [runner.again(regime, count).sampled for _ in range(steps - 1)]
    single = torch.stack(tokens, 1).tolist()
    wrong = [
        f"prompt {index} is answered otherwise than step by step, {name}"
        for name, some in answers.items()
        for index, answer in enumerate(some)
        if list(answer.token_ids) != single[index]
    ]
    note = wrong[0] if wrong else ""
    return Finding("engine", "tokens", not wrong, {"prompts": count, "tokens": steps}, note)


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
