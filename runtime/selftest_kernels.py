"""Every kernel of a plan against the reference in the artifact, in the steps that launch it.

In: an artifact, an executor with weights. Out: findings: logits of each regime, and keys and values
of each layer, which say where a fault begins. What rounding may do is measured, not assumed.
"""

from collections.abc import Iterator, Sequence

import torch

from sitsc.core.artifact import Artifact
from sitsc.core.plan import KvGroup
from sitsc.core.reference import FILE, read_reference
from sitsc.runtime.selftest_findings import Finding
from sitsc.runtime.selftest_reference import Expected, Texts, expected, row_errors
from sitsc.runtime.selftest_steps import StepRunner, prefill_choice

_ALLOWED = 2.0
_LEAST = 2e-3


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
    findings += check_layers(runner, texts, want, moved, "prefill")
    for regime in runner.plan.regimes:
        if regime.kind == "decode":
            rows = list(range(min(regime.sizes["sequences"], len(texts.ids))))
            _forget_next(runner, texts, want.kept)
            found = runner.decode(regime, texts, rows)
            findings.append(_judged(regime.name, found.logits, logits[rows, 1], allowed))
            findings += check_layers(runner, texts, want, moved, regime.name, len(rows))
            ran.add(regime.name)
    missing = [name for name in runner.regimes if name not in ran]
    findings += [Finding("kernels", name, None, {}, "no step was that large") for name in missing]
    return findings


def _judged(name: str, value: torch.Tensor, wanted: torch.Tensor, allowed: float) -> Finding:
    errors = row_errors(value, wanted)
    worst = float(errors.max())
    figures = {"rows": len(errors), "worst_error": worst, "allowed": allowed}
    note = "" if worst <= allowed else f"relative error {worst:.1e}, {allowed:.1e} is rounding"
    return Finding("kernels", name, worst <= allowed, figures, note)


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


def check_layers(
    runner: StepRunner, texts: Texts, want: Expected, moved: Expected, name: str, decoded: int = 0
) -> Iterator[Finding]:
    """Keys and values in the pools: the first layer that differs is where to look.

    Those of the prompts, or those that a decode step of the first `decoded` sequences added.
    """
    rows = [(at, i) for at, i in enumerate(want.kept) if not decoded or i < decoded]
    for group in runner.plan.kv:
        if group.dtype != "bfloat16":
            yield Finding("layers", name, None, {}, f"{group.name} is {group.dtype}")
            continue
        pool = layered_pool(runner, group)
        figures: dict[str, float | int | str | bool] = {"worst_error": 0.0, "allowed": _LEAST}
        note = ""
        for place, layer in enumerate(group.layers):
            for at, index in rows:
                table = torch.tensor(texts.tables[index], device=pool.device)
                found = pool[place][table].permute(1, 0, 3, 2, 4).flatten(1, 2)
                count = texts.prompts[index]
                part = slice(count, count + 1) if decoded else slice(0, count)
                good = want.keys_values[group.name, place][at]
                noise = moved.keys_values[group.name, place][at]
                for mine, side, other in zip(found, good, noise, strict=True):
                    error = _flat_error(mine[part], side[part])
                    limit = _ALLOWED * _flat_error(other, side) + _LEAST
                    if error > float(figures["worst_error"]):
                        figures = {"worst_error": error, "allowed": limit}
                    if error > limit:
                        note = f"layer {layer} is the first that differs: {error:.1e}"
            if note:
                break
        yield Finding("layers", name, not note, figures, note)


def layered_pool(runner: StepRunner, group: KvGroup) -> torch.Tensor:
    """A pool as [layers, pages, 2, kv_heads, page_tokens, head_dim]."""
    shape = (len(group.layers), -1, 2, group.kv_heads, group.page_tokens, group.head_dim)
    return runner.executor.memory.pools[group.name].view(torch.bfloat16).view(shape)


def _forget_next(runner: StepRunner, texts: Texts, kept: Sequence[int]) -> None:
    """Not-a-number where the next decode step must write keys and values."""
    for group in runner.plan.kv:
        if group.dtype == "bfloat16":
            pool = layered_pool(runner, group)
            for index in kept:
                page, slot = divmod(texts.prompts[index], group.page_tokens)
                pool[:, texts.tables[index][page], :, :, slot] = float("nan")
    torch.cuda.synchronize()


def _flat_error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error of the norm over everything."""
    return float(row_errors(value.flatten(), wanted.flatten()))
