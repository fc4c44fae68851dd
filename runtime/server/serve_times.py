"""What serving measures of a plan beside its work: TPOT and TTFT at the sizes that occurred.

In: when requests came and when their tokens did. Out: `Measured` points for `actual.json`. A time
counts only where it is what the plan predicts: TPOT while the running requests stay the same and
all decode, TTFT of a request that nothing else ran beside. Memory is bounded.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from sitsc.core.actual import TPOT, TTFT, Measured
from sitsc.runtime.engine import Output

FEWEST_STEPS, FEWEST_PROMPTS = 16, 3
_KEPT = 256  # samples of one size, the latest
_FEWEST_CONTEXT = 32  # tokens; shorter contexts are one size
_PARTS = 4  # sizes of prompts an octave


@dataclass(slots=True)
class _Running:
    """A request in the engine. `tokens` are those of its prompt and answer."""

    asked: float
    prompt_tokens: int
    tokens: int
    alone: bool
    decodes: bool = False


class ServeTimes:
    """Collects samples; `points` sums them up."""

    def __init__(self) -> None:
        self._running: dict[int, _Running] = {}
        self._decoding = 0  # requests that have their first token
        self._tokens = 0  # of those, prompts and answers
        self._seen: dict[frozenset[int], float] = {}  # when the same requests had a token before
        self._steps: dict[tuple[int, int], deque[tuple[float, float]]] = {}
        self._prompts: dict[int, deque[tuple[float, int]]] = {}

    def asked(self, request_id: int, prompt_tokens: int, now: float) -> None:
        """A request came at `now` (seconds)."""
        for other in self._running.values():
            other.alone = False
        alone = not self._running
        self._running[request_id] = _Running(now, prompt_tokens, prompt_tokens, alone)
        self._seen.clear()

    def stepped(self, outputs: Iterable[Output], num_running: int, now: float) -> None:
        """A step gave these outputs at `now`; `num_running` requests are in the batch after it."""
        ids: list[int] = []
        changed = False
        for output in outputs:
            request = self._running.get(output.request_id)
            if request is None:
                continue
            ids.append(output.request_id)
            changed = self._count(request, output, now) or changed
        if changed:
            self._seen.clear()
        elif ids and self._decoding == num_running:
            self._step(frozenset(ids), now)

    def points(self) -> tuple[Measured, ...]:
        """The middle of each size that occurred often enough: TPOT and TTFT in ms."""
        found = [
            _tpot(sequences, 2**size, samples)
            for (sequences, size), samples in sorted(self._steps.items())
            if len(samples) >= FEWEST_STEPS
        ]
        found += [
            _ttft(round(2 ** (size / _PARTS)), samples)
            for size, samples in sorted(self._prompts.items())
            if len(samples) >= FEWEST_PROMPTS
        ]
        return tuple(found)

    def _count(self, request: _Running, output: Output, now: float) -> bool:
        """Take an output; whether it changed which requests decode."""
        new = len(output.token_ids)
        first = bool(new) and not request.decodes
        request.tokens += new
        if first:
            request.decodes = True
            self._decoding += 1
            self._tokens += request.tokens
            if request.alone:
                self._prompt(request, now)
        elif request.decodes:
            self._tokens += new
        if output.finish_reason is None:
            return first
        del self._running[output.request_id]
        if request.decodes:
            self._decoding -= 1
            self._tokens -= request.tokens
        return True

    def _step(self, ids: frozenset[int], now: float) -> None:
        before = self._seen.get(ids)
        self._seen[ids] = now
        if before is None:
            return
        context = self._tokens / self._decoding - 1  # the last token is not in the pages yet
        size = int(math.log2(max(context, _FEWEST_CONTEXT)))
        samples = self._steps.setdefault((self._decoding, size), deque(maxlen=_KEPT))
        samples.append((1e3 * (now - before), context))

    def _prompt(self, request: _Running, now: float) -> None:
        tokens = request.prompt_tokens
        samples = self._prompts.setdefault(int(_PARTS * math.log2(tokens)), deque(maxlen=_KEPT))
        samples.append((1e3 * (now - request.asked), tokens))


def _tpot(sequences: int, size: int, samples: Iterable[tuple[float, float]]) -> Measured:
    """The median at the mean context; the key says the least context of that size."""
    times, contexts = zip(*samples, strict=True)
    context = statistics.mean(contexts)
    key = f"serve_bs{sequences}_ctx{size}"
    return Measured(key, TPOT, statistics.median(times), sequences=sequences, context=context)


def _ttft(size: int, samples: Iterable[tuple[float, int]]) -> Measured:
    """The sample in the middle by time a token: a time and the length that it belongs to.

    The key says the least length of that size.
    """
    ordered = sorted(samples, key=lambda sample: sample[0] / sample[1])
    ms, tokens = ordered[len(ordered) // 2]
    return Measured(f"serve_ttft_{size}", TTFT, ms, tokens=tokens)
