"""Measuring through the engine, on a small model on the CPU, and what does not fit a plan."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.errors import OptionError
from sitsc.runtime.engine_measure import (
    FEWEST_STEPS,
    WARM_STEPS,
    decode_steps,
    measure_tpot,
    measure_ttft,
)
from sitsc.runtime.loader import load


@pytest.fixture(scope="module")
def session(tiny_artifact: Path) -> Any:
    return load(tiny_artifact)


def idle(session: Any) -> bool:
    """Nothing of a measurement is left behind."""
    pages = session.engine.scheduler.pages
    return not session.engine.has_work and pages.num_free == pages.num_pages


@pytest.mark.parametrize(("batch", "context"), [(1, 16), (4, 33), (8, 40)])
def test_time_per_token(session, batch, context):
    found = measure_tpot(session, batch, context, 24)
    assert (found.batch, found.context, found.steps) == (batch, context, 24)
    assert 0 < found.tpot_ms < 1e3 and 0 < found.p50_ms <= found.p95_ms
    assert found.tokens_per_s == pytest.approx(1e3 * batch / found.tpot_ms)
    assert context + WARM_STEPS < found.mean_context < context + WARM_STEPS + 40
    assert found.prefill_s > 0 and idle(session)


def test_time_to_first_token(session):
    found = measure_ttft(session, 40, 3)
    assert len(found.all_ms) == 3 and min(found.all_ms) == found.best_ms <= found.median_ms
    assert idle(session)


def test_steps_are_marked_for_a_profiler(session):
    seen: list[str] = []

    @contextlib.contextmanager
    def mark(name: str) -> Iterator[None]:
        seen.append(name)
        yield

    measure_tpot(session, 2, 16, FEWEST_STEPS, mark)
    assert seen[0] == "prefill bs2 ctx16" and seen.count("decode bs2 ctx16") == FEWEST_STEPS
    seen.clear()
    measure_ttft(session, 16, 2, mark)
    assert seen == ["ttft 16"] * 3


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(1, 3000), st.integers(FEWEST_STEPS, 400))
def test_what_is_measured_fits_the_pages(session, batch, context, wanted):
    plan = session.artifact.plan
    page = plan.kv[0].page_tokens
    try:
        steps = decode_steps(plan, batch, context, wanted)
    except OptionError:
        needed = -(-(context + FEWEST_STEPS) // page) + 1
        assert batch * (needed + 2) > plan.memory.kv_pages or (
            context + 3 * FEWEST_STEPS + context * batch // 64 > plan.tokens.max_context
        )
        return
    assert FEWEST_STEPS <= steps <= wanted
    whole = context + steps + WARM_STEPS
    assert whole <= plan.tokens.max_context
    assert batch * -(-whole // page) <= plan.memory.kv_pages


@pytest.mark.parametrize(
    ("batch", "context", "says"),
    [(0, 8, "--batch 0"), (9, 8, "--max-batch"), (1, 0, "--context 0"), (1, 10**6, "more --")],
)
def test_rows_outside_of_the_plan_say_why(session, batch, context, says):
    with pytest.raises(OptionError) as caught:
        measure_tpot(session, batch, context, 16)
    assert says in str(caught.value) and idle(session)


def test_a_prompt_that_is_too_long(session):
    with pytest.raises(OptionError, match="does not fit"):
        measure_ttft(session, 10**6, 1)
