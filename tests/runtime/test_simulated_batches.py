"""The simulator forms the batches that the real engine forms: same requests, rows and pages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.scheduler import SchedulerLimits
from sitsc.core.serving.simulator import Arrival, BatchSizes, Serving, StepCost, simulate
from sitsc.runtime.engine import Engine
from sitsc.runtime.loader import load
from tests.runtime.engine_models import (
    VOCAB,
    WIDTH,
    AheadExecutor,
    PagedExecutor,
    one_thread,  # noqa: F401  (a fixture of every test here)
)

LIMITS = SchedulerLimits(max_batch=3, max_step_tokens=12, prefill_chunk_tokens=5, max_context=48)


def shape(batch: StepBatch) -> tuple[Any, ...]:
    """Everything of a batch but its tokens."""
    tables = [list(table) for table in batch.block_tables]  # live lists
    return (
        batch.regime,
        batch.request_ids,
        list(batch.query_start),
        list(batch.context_lens),
        tables,
        list(batch.sample),
    )


class StagedExecutor(AheadExecutor):
    """As many steps under way as three stages hold."""

    num_ahead = 2


class PassingExecutor(AheadExecutor):
    """Three stages, the last of which tells the first what it sampled."""

    num_ahead = 3


class Recorded:
    """An engine whose steps take a second each, with what it scheduled."""

    def __init__(self, made: Engine) -> None:
        self.engine, self.batches = made, []
        self.now = self.free = 0.0
        self.ends: list[float] = []
        schedule, settle = made.scheduler.schedule, made.scheduler.settle

        def scheduled(**how: bool) -> StepBatch | None:
            batch = schedule(**how)
            if batch is not None:
                self.batches.append(shape(batch))
                self.free = max(self.now, self.free) + 1.0
                self.ends.append(self.free)
            return batch

        def settled(*arguments: Any) -> Any:
            self.now = self.ends.pop(0)
            return settle(*arguments)

        made.scheduler.schedule, made.scheduler.settle = scheduled, settled  # pyright: ignore

    def run(self, arrivals: list[Arrival]) -> list[tuple[Any, ...]]:
        """Replay the arrivals; the batches."""
        coming = sorted(arrivals, key=lambda a: a.at)
        while coming or self.engine.has_work:
            if not self.engine.has_work:
                self.now = max(self.now, coming[0].at)
            while coming and coming[0].at <= self.now:
                one = coming.pop(0)
                options = SamplingOptions(max_tokens=one.output_tokens, ignore_eos=True)
                self.engine.add_request([5] * one.prompt_tokens, options)
            self.engine.step()
        return self.batches


def simulated(arrivals: list[Arrival], serving: Serving) -> list[tuple[Any, ...]]:
    """The batches that the simulator forms when each step takes a second."""

    def cost(sizes: BatchSizes) -> StepCost:
        assert sizes.tokens > 0
        return StepCost((1.0,), (0.0,))

    batches: list[tuple[Any, ...]] = []
    simulate(arrivals, serving, cost, observe=lambda _, batch: batches.append(shape(batch)))
    return batches


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.builds(
            Arrival,
            st.integers(0, 30).map(lambda n: n + 0.5),
            st.integers(1, 20),
            st.integers(1, 12),
        ),
        min_size=1,
        max_size=7,
    ),
    st.integers(8, 30),
    st.sampled_from([PagedExecutor, AheadExecutor, StagedExecutor, PassingExecutor]),
)
def test_as_the_engine(arrivals, pages, kind) -> None:
    """With page pressure and preemptions; one step ahead, none, or micro-batches."""
    staged, passing = kind in (StagedExecutor, PassingExecutor), kind is PassingExecutor
    limits = replace(LIMITS, micro_batches=3 if staged else 1, tokens_ahead=passing)
    steps = kind(pages, 4)
    sizes = {"num_pages": pages, "page_tokens": 4, "vocab_size": VOCAB, "logits_width": WIDTH}
    made = Engine(steps, None, limits, **sizes)
    ahead = steps.num_ahead if isinstance(steps, AheadExecutor) else 0
    serving = Serving(limits, pages, 4, num_ahead=ahead)
    assert simulated(arrivals, serving) == Recorded(made).run(arrivals)


def test_as_a_compiled_model(tiny_artifact: Path) -> None:
    session = load(tiny_artifact)
    plan = session.artifact.plan
    limits = SchedulerLimits(
        plan.schedule.max_batch,
        plan.schedule.max_step_tokens,
        plan.schedule.prefill_chunk_tokens,
        plan.tokens.max_context,
    )
    serving = Serving(limits, plan.memory.kv_pages, plan.kv[0].page_tokens)
    arrivals = [Arrival(0.7 * i, 1 + 37 * i % 90, 1 + 11 * i % 30) for i in range(12)]
    assert simulated(arrivals, serving) == Recorded(session.engine).run(arrivals)
