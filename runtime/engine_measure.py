"""Measuring what a user of the engine sees: time per output token and time to first token.

In: a session that serves nobody. Out: milliseconds. Requests are token ids, greedy, and go on
whatever they say; steps are made and timed as any caller makes them. Works on every target.
"""

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sitsc.core.errors import ExecutionError, OptionError
from sitsc.core.plan import Plan
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.engine import Engine, Output
from sitsc.runtime.measure import drain, percentile, random_ids

WARM_STEPS = 8
FEWEST_STEPS = 16
_SPARE = 2
Range = Callable[[str], contextlib.AbstractContextManager[Any]]


def no_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """Marks nothing in a profile."""
    del name
    return contextlib.nullcontext()


@dataclass(frozen=True, slots=True)
class Tpot:
    """Decode of `batch` sequences after prompts of `context` tokens.

    `tpot_ms` is the time between the first and the last of `steps` tokens of a sequence over their
    number less one, the mean of all sequences; p50 and p95 are of single steps. `mean_context` is
    the mean length while it was measured.
    """

    batch: int
    context: int
    steps: int
    tpot_ms: float
    p50_ms: float
    p95_ms: float
    tokens_per_s: float
    prefill_s: float
    mean_context: float


@dataclass(frozen=True, slots=True)
class Ttft:
    """From a request of `tokens` ids to its first token: the median of several, and the best."""

    tokens: int
    median_ms: float
    best_ms: float
    all_ms: tuple[float, ...]


def decode_steps(plan: Plan, batch: int, context: int, wanted: int) -> int:
    """How many of `wanted` steps fit the plan. Raises OptionError when too few do."""
    schedule, page = plan.schedule, plan.kv[0].page_tokens
    if not 1 <= batch <= schedule.max_batch:
        raise OptionError(
            f"--batch {batch} is outside 1..{schedule.max_batch}",
            hint="compile with a larger --max-batch",
        )
    if context < 1:
        raise OptionError(f"--context {context} is no length", hint="at least 1 token")
    pages = plan.memory.kv_pages // batch - (1 if batch > 1 else 0)
    room = min(plan.tokens.max_context, pages * page)
    fits = room - context - _ahead(plan, batch, context) - WARM_STEPS - _SPARE
    if fits < FEWEST_STEPS:
        which = "--max-context" if room == plan.tokens.max_context else "--kv-tokens"
        raise OptionError(
            f"{batch} x {context} tokens and {FEWEST_STEPS} steps do not fit {max(0, room)} tokens "
            "a sequence",
            hint=f"compile with more {which}",
        )
    return min(wanted, fits)


def _ahead(plan: Plan, batch: int, context: int) -> int:
    """Tokens that the first sequence may have before the last has its first."""
    room = max(1, plan.schedule.max_step_tokens - batch)
    return -(-batch * context // room) + 1


def measure_tpot(
    session: Any, batch: int, context: int, steps: int, mark: Range = no_range
) -> Tpot:
    """Time per output token once all prompts are computed. Raises OptionError, ExecutionError."""
    engine: Engine = session.engine
    plan: Plan = session.artifact.plan
    steps = decode_steps(plan, batch, context, steps)
    answer = steps + WARM_STEPS + _ahead(plan, batch, context) + _SPARE
    options = SamplingOptions(max_tokens=answer, ignore_eos=True)
    vocabulary = plan.tokens.vocab_size
    started = time.perf_counter()
    ids = [
        engine.add_request(random_ids(context, vocabulary, seed=7 + i), options)
        for i in range(batch)
    ]
    counts = dict.fromkeys(ids, 0)
    try:
        with mark(f"prefill bs{batch} ctx{context}"):
            while not all(counts.values()):
                _count(counts, _stepped(engine))
        prefill_s = time.perf_counter() - started
        for _ in range(WARM_STEPS):
            _count(counts, _stepped(engine))
        before = sum(counts.values()) / batch
        times = _timed(engine, ids, steps, mark, f"decode bs{batch} ctx{context}")
    finally:
        drain(engine, ids)
    spans = [(seen[-1] - seen[0]) / (len(seen) - 1) for seen in times.values()]
    single = [b - a for a, b in zip(times[ids[0]], times[ids[0]][1:], strict=False)]
    tpot = statistics.mean(spans)
    return Tpot(
        batch=batch,
        context=context,
        steps=steps,
        tpot_ms=tpot * 1e3,
        p50_ms=percentile(single, 0.5) * 1e3,
        p95_ms=percentile(single, 0.95) * 1e3,
        tokens_per_s=batch / tpot,
        prefill_s=prefill_s,
        mean_context=context + before + steps / 2,
    )


def measure_ttft(session: Any, tokens: int, repeats: int, mark: Range = no_range) -> Ttft:
    """Time to the first token of a lone prompt, another one each time, after one to warm up."""
    engine: Engine = session.engine
    plan: Plan = session.artifact.plan
    room = min(plan.tokens.max_context, plan.memory.kv_pages * plan.kv[0].page_tokens)
    if not 1 <= tokens < room:
        raise OptionError(
            f"a prompt of {tokens} tokens does not fit {room} tokens",
            hint="compile with more --max-context and --kv-tokens",
        )
    options = SamplingOptions(max_tokens=1, ignore_eos=True)
    times = []
    for repeat in range(repeats + 1):
        prompt = random_ids(tokens, plan.tokens.vocab_size, seed=100 + repeat)
        with mark(f"ttft {tokens}"):
            start = time.perf_counter()
            request = engine.add_request(prompt, options)
            while not any(output.token_ids for output in _stepped(engine)):
                pass
            times.append(1e3 * (time.perf_counter() - start))
        drain(engine, [request])
    kept = times[1:]
    return Ttft(tokens, statistics.median(kept), min(kept), tuple(kept))


def _timed(
    engine: Engine, ids: list[int], steps: int, mark: Range, name: str
) -> dict[int, list[float]]:
    """When each of `steps` tokens of every request came."""
    times: dict[int, list[float]] = {request: [] for request in ids}
    while any(len(seen) < steps for seen in times.values()):
        with mark(name):
            outputs = _stepped(engine)
        now = time.perf_counter()
        for output in outputs:
            times[output.request_id] += [now] * len(output.token_ids)
    return times


def _stepped(engine: Engine) -> list[Output]:
    """The outputs of a step. Raises ExecutionError where a request ended too early."""
    outputs = engine.step()
    for output in outputs:
        if output.error is not None:
            raise ExecutionError(f"a measured request failed: {output.error}") from output.error
    if not outputs and not engine.has_work:
        raise ExecutionError("the engine ran out of work while it was measured")
    return outputs


def _count(counts: dict[int, int], outputs: list[Output]) -> None:
    for output in outputs:
        counts[output.request_id] += len(output.token_ids)
