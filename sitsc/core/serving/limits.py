"""The scheduler's limits as a plan states them, for the engine and for the simulator."""

from sitsc.core.plan import Plan
from sitsc.core.serving.scheduler import SchedulerLimits


def limits_of(plan: Plan) -> SchedulerLimits:
    """What a step and a request of a plan may hold; as many micro-batches as there are stages.

    Prompts are cut as the plan says for their length.
    """
    schedule = plan.schedule
    return SchedulerLimits(
        max_batch=schedule.max_batch,
        max_step_tokens=schedule.max_step_tokens,
        prefill_chunk_tokens=schedule.prefill_chunk_tokens,
        max_context=plan.tokens.max_context,
        micro_batches=plan.parallel.pp,
        chunks=tuple((cut.high_tokens, cut.chunk_tokens) for cut in plan.parallel.cuts),
    )
