"""Choosing among the candidates of a golden configuration, and what a new one says otherwise.

In: records with predicted and measured figures. Out: the record with the best chosen; lines.
"""

from collections.abc import Sequence
from dataclasses import replace

from sitsc.core.errors import GoldenError
from sitsc.core.golden import Figures, Golden, GoldenAsked, GoldenCandidate, finished


def measured_figures(predicted: Figures, outputs: int, ttft_ms: float, tpot_ms: float) -> Figures:
    """Figures under load from a measured prompt and a measured step.

    As predicted: a sequence takes its prompt, those of the others, and its `outputs` tokens;
    prompts take as many times as long as the measured one does.
    """
    scale = ttft_ms / predicted.ttft_ms
    waits = scale * (predicted.loaded_tpot_ms - predicted.tpot_ms)
    cycle = scale * (predicted.cycle_ms - outputs * predicted.tpot_ms) + outputs * tpot_ms
    speed = predicted.tokens_per_s * predicted.cycle_ms / cycle
    return Figures(ttft_ms, tpot_ms, tpot_ms + waits, cycle, speed)


def rank_key(figures: Figures, asked: GoldenAsked) -> tuple[bool, float, float, float]:
    """The order of `sitsc partition`: what keeps the limits, by tokens/s; the rest by its miss.

    With a rate no more tokens count than it brings.
    """
    miss = figures.misses(asked)
    need = asked.rate * asked.output_tokens
    speed = min(figures.tokens_per_s, need) if need else figures.tokens_per_s
    return miss > 1, miss if miss > 1 else -speed, figures.tpot_ms, figures.ttft_ms


def choose(golden: Golden, candidates: Sequence[GoldenCandidate]) -> Golden:
    """The record with these candidates, and the best of them chosen.

    Raises GoldenError when none keeps the limits.
    """
    asked, found = golden.asked, tuple(candidates)
    best = min(range(len(found)), key=lambda i: rank_key(found[i].figures, asked))
    figures = found[best].figures
    if (miss := figures.misses(asked)) > 1:
        raise GoldenError(
            f"no candidate keeps {asked.slo_text()} when measured: the nearest is "
            f"{found[best].name} with {miss:.2f} times the limit (TTFT {figures.ttft_ms:.4g} ms, "
            f"TPOT {figures.loaded_tpot_ms:.4g} ms)",
            hint="a wider limit, more devices, or --no-measure for the predicted choice",
        )
    options = golden.options | found[best].options
    return finished(replace(golden, candidates=found, chosen=best, options=options))


def changes(old: Golden, new: Golden) -> list[str]:
    """What a new record says otherwise than an old one, one line each."""
    found = []
    for name in sorted({*old.options, *new.options}):
        a, b = old.options.get(name), new.options.get(name)
        if a != b:
            found.append(f"option {name}: {a} → {b}")
    if old.model.fingerprint != new.model.fingerprint:
        found.append(f"model: {old.model.name} → {new.model.name}, another config")
    if (old.devices, old.target) != (new.devices, new.target):
        found.append(f"target: {old.target}:{old.devices} → {new.target}:{new.devices}")
    if old.asked != new.asked:
        found.append("the workload or the limits are others")
    names = {name for name, _ in old.data.items() ^ new.data.items()}
    found += [f"{name} is another" for name in sorted(names)]
    if old.best.plan != new.best.plan:
        found.append(f"plan: {old.best.plan[:12]} → {new.best.plan[:12]}")
    for name in ("ttft_ms", "loaded_tpot_ms", "tokens_per_s"):
        a, b = getattr(old.best.figures, name), getattr(new.best.figures, name)
        if a != b:
            found.append(f"{name}: {a:.5g} → {b:.5g} ({100 * (b / a - 1):+.1f} %)")
    if old.status != new.status:
        found.append(f"{old.status} → {new.status}")
    return found
