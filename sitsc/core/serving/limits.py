"""The scheduler's limits as a plan states them, for the engine and for the simulator."""

from collections.abc import Sequence

from sitsc.core.plan import Plan, PrefillCut
from sitsc.core.serving.scheduler import SchedulerLimits

_GPU = "sm_"


def limits_of(plan: Plan) -> SchedulerLimits:
    """What a step and a request of a plan may hold; as many micro-batches as there are stages.

    On GPUs sampled tokens go from the last stage to the first without the host. Prompts are cut as
    the plan says for their length.
    """
    schedule = plan.schedule
    return SchedulerLimits(
        max_batch=schedule.max_batch,
        max_step_tokens=schedule.max_step_tokens,
        prefill_chunk_tokens=schedule.prefill_chunk_tokens,
        max_context=plan.tokens.max_context,
        micro_batches=plan.parallel.pp,
        tokens_ahead=plan.parallel.pp > 1 and plan.target.isa.startswith(_GPU),
        chunks=chunks_of(plan.parallel.cuts),
    )


def chunks_of(cuts: Sequence[PrefillCut]) -> tuple[tuple[int, int], ...]:
    """Cuts of prompts as the scheduler takes them: (up to so many tokens, their chunk)."""
    return tuple((cut.high_tokens, cut.chunk_tokens) for cut in cuts)
