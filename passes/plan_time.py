"""Seconds of the batches that a scheduler forms, by what an artifact's plan predicts.

In: the regimes of each stage of a plan. Out: the cost of a step. Sizes between two regimes lie on
the line between them; attention follows the context, which regimes fix, but for what its launches
cost at any context.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sitsc.core.plan import Plan, Regime
from sitsc.core.serving.limits import limits_of
from sitsc.core.serving.simulator import Arrival, BatchSizes, StepCost, replay_prompts

_ATTENTION = "sitsc.paged_attention"
_TEMPLATES = ("attention", "kv_write")
_US = 1e-6
Send = Callable[[int], float]  # tokens → seconds to the next stage


@dataclass(frozen=True, slots=True)
class _Point:
    """A regime: its tokens, microseconds without attention, those of attention a unit of work."""

    tokens: int
    us: float
    attention_us: float


class PlanTime:
    """`PlanTime(stages, send, launch)(sizes)`: a `StepCost`; `launch` is a launch's fixed seconds.

    `stages` are the regimes of each stage.

    A unit of attention is a token of context for a decoding sequence, and a pair of tokens for a
    prompt. Sums over ranks are part of the regimes and not told apart.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Regime]],
        send: Send = lambda tokens: 0.0,
        launch: float = 0.0,
    ) -> None:
        self.send, us = send, launch / _US
        self.decode = [_points(stage, "decode", _decode_work, us) for stage in stages]
        self.prefill = [_points(stage, "prefill", _prompt_work, us) for stage in stages]

    def __call__(self, sizes: BatchSizes) -> StepCost:
        """The cost of a step."""
        stages = []
        for decode, prefill in zip(self.decode, self.prefill, strict=True):
            us, each = _at(prefill if sizes.pieces else decode, sizes.tokens)
            if sizes.pieces:
                pairs = (p.tokens * (p.context + (p.tokens + 1) / 2) for p in sizes.pieces)
                us += each * sum(pairs)
            if sizes.decode:
                _, each = _at(decode, sizes.decode)
                us += each * (sizes.decode_context + sizes.decode)
            stages.append(us * _US)
        send = self.send(sizes.tokens) if len(stages) > 1 else 0.0
        return StepCost(tuple(stages), (0.0,) * len(stages), send)


def _decode_work(regime: Regime) -> float:
    return regime.sizes["sequences"] * (regime.sizes["context"] + 1)


def _prompt_work(regime: Regime) -> float:
    tokens = regime.sizes["tokens"]
    return tokens * (regime.sizes["context"] + (tokens + 1) / 2)


def plan_time(plan: Plan, send: Send = lambda tokens: 0.0) -> PlanTime:
    """The times of all stages of a plan."""
    stages = [stage.regimes for stage in plan.stages] or [plan.regimes]
    gpu = plan.target.isa.startswith("sm_")
    return PlanTime(stages, send, launch_seconds(plan) if gpu else 0.0)


def decode_seconds(plan: Plan, time: PlanTime, sequences: int, context: float) -> float:
    """Between two tokens of a sequence, `context` tokens long on average.

    As many micro-batches as there are stages take turns.
    """
    parts = plan.parallel.pp
    share = -(-sequences // parts)
    step = time(BatchSizes(share, round(share * context)))
    return max(sum(step.stages) + parts * step.send, parts * max(step.stages))


def prompt_seconds(plan: Plan, time: PlanTime, tokens: int) -> float:
    """From a lone prompt to its first token; its pieces follow each other through the stages."""
    limits = limits_of(plan)
    return replay_prompts([Arrival(0.0, tokens, 1)], limits.pieces_of, time)[0]


def launch_seconds(plan: Plan) -> float:
    """What a launch costs at any size, by the ceilings that a plan was predicted with."""
    names = ("launch_seconds", "kernel_seconds")
    return sum(plan.target.ceilings[name].value for name in names if name in plan.target.ceilings)


def _launches(regime: Regime) -> int:
    """Launches of attention that a plan shows; packages hide theirs."""
    return sum(
        max(1, len(group.layers))
        for group in regime.groups
        for launch in group.launches
        if launch.template.startswith(_TEMPLATES)
    )


def _points(
    regimes: Sequence[Regime], kind: str, work: Callable[[Regime], float], launch_us: float
) -> tuple[_Point, ...]:
    """The regimes of a kind by their tokens."""
    found = []
    for regime in regimes:
        if regime.kind == kind:
            rows = [k for k in regime.kernels if k.op == _ATTENTION]
            attention = sum(k.predicted_us for k in rows)
            all_rows = sum(k.predicted_us for k in regime.kernels) or 1.0
            if all_rows > regime.predicted_us or not _launches(regime):
                attention *= regime.predicted_us / all_rows  # where rows are not what is launched
            attention -= min(attention, launch_us * _launches(regime))
            rest = regime.predicted_us - attention
            found.append(_Point(regime.sizes["tokens"], rest, attention / work(regime)))
    return tuple(sorted(found, key=lambda p: p.tokens))


def _at(points: Sequence[_Point], tokens: int) -> tuple[float, float]:
    """Microseconds without attention, and a unit of attention, at so many tokens."""
    at = bisect_left(points, tokens, key=lambda p: p.tokens)
    if at == 0:
        return points[0].us, points[0].attention_us
    low, high = points[at - 1], points[min(at, len(points) - 1)]
    if high is low:  # beyond the largest: as many times as long
        return low.us * tokens / low.tokens, low.attention_us
    share = (tokens - low.tokens) / (high.tokens - low.tokens)
    us = low.us + share * (high.us - low.us)
    return us, low.attention_us + share * (high.attention_us - low.attention_us)
