"""Measuring a loaded artifact: decode steps, time to first token, bandwidth.

In: a `Session`. Out: figures in the units that their names say. Prompts are pseudo-random ids, so
that every engine can be given the same ones.
"""

import time
from dataclasses import dataclass

import torch

from sitsc.core.errors import OptionError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.runtime.engine import Engine
from sitsc.runtime.loader import Session

_MULTIPLIER, _MODULUS = 48271, 2147483647
_WARM_STEPS = 4


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Decode of one (batch, context): milliseconds a step, tokens a second of the batch."""

    batch: int
    context: int
    median_ms: float
    best_ms: float
    p95_ms: float
    tokens_per_s: float


def random_ids(count: int, vocab_size: int, seed: int = 1) -> list[int]:
    """`count` pseudo-random ids, the same everywhere (a Lehmer generator)."""
    ids, state = [], seed
    for _ in range(count):
        state = state * _MULTIPLIER % _MODULUS
        ids.append(10 + state % (vocab_size - 10))
    return ids


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0..1) of the sorted values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_decode(session: Session, batch: int, context: int, steps: int) -> DecodeResult:
    """Steps of the engine with `batch` sequences decoding after prompts of `context` tokens."""
    engine, vocab = session.engine, session.artifact.plan.tokens.vocab_size
    answer = steps + _WARM_STEPS + batch + 8
    _check(session, batch, context, answer)
    options = SamplingOptions(max_tokens=answer, ignore_eos=True)
    ids = [
        engine.add_request(random_ids(context, vocab, seed=7 + i), options) for i in range(batch)
    ]
    waiting = set(ids)
    while waiting:
        waiting -= {output.request_id for output in engine.step() if output.token_ids}
    for _ in range(_WARM_STEPS):
        engine.step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    drain(engine, ids)
    middle = percentile(times, 0.5)
    return DecodeResult(
        batch=batch,
        context=context,
        median_ms=middle * 1e3,
        best_ms=min(times) * 1e3,
        p95_ms=percentile(times, 0.95) * 1e3,
        tokens_per_s=batch * steps / sum(times),
    )


def measure_ttft(session: Session, tokens: int, repeats: int) -> float:
    """Best milliseconds from a request of `tokens` ids to its first token."""
    vocab = session.artifact.plan.tokens.vocab_size
    _check(session, 1, tokens, 1)
    times = []
    for repeat in range(repeats):
        prompt = random_ids(tokens, vocab, seed=100 + repeat)
        start = time.perf_counter()
        request = session.engine.add_request(prompt, SamplingOptions(max_tokens=1, ignore_eos=True))
        while not any(output.token_ids for output in session.engine.step()):
            pass
        times.append(time.perf_counter() - start)
        drain(session.engine, [request])
    return min(times) * 1e3


def _check(session: Session, batch: int, context: int, answer: int) -> None:
    """Raises OptionError for a measurement that the artifact was not planned for."""
    plan = session.artifact.plan
    if not 1 <= batch <= plan.schedule.max_batch:
        raise OptionError(
            f"--batch {batch} is outside 1..{plan.schedule.max_batch}",
            hint="compile with a larger --max-batch",
        )
    longest = min(plan.tokens.max_context, plan.memory.kv_pages * plan.kv[0].page_tokens // batch)
    if context < 1 or context + answer > longest:
        raise OptionError(
            f"{batch} x {context} tokens and {answer} steps do not fit {longest} tokens a sequence",
            hint="a smaller --context or --steps, or compile with more --kv-tokens",
        )


def drain(engine: Engine, ids: list[int]) -> None:
    """End requests and finish the steps that they were in."""
    for request in ids:
        engine.abort(request)
    while engine.has_work:
        engine.step()


def measure_kernel_step(session: Session, context: int, steps: int) -> float:
    """Best milliseconds of one decode launch alone, without scheduling and sampling."""
    pages = context // session.artifact.plan.kv[0].page_tokens + 1
    batch = StepBatch("decode", (0,), [42], [0, 1], [context], [list(range(pages))], [True])
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        session.executor.execute(batch)
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def measure_read_bandwidth(nbytes: int = 1 << 29, repeats: int = 7) -> float:
    """Best bytes a second of summing a large tensor with the threads in use."""
    data = torch.ones(nbytes // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        best = max(best, nbytes / (time.perf_counter() - start))
    return best
