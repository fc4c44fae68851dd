"""How prompts are cut, by length: whole, chunk after chunk, or chunks through the stages.

In: a replica. Out: one cut for each range of lengths, with the crossover lengths. Every time is a
replay of the pieces through the stages, each of which does one piece at a time.
"""

from dataclasses import dataclass
from itertools import pairwise

from sitsc.core.plan import PrefillCut
from sitsc.passes.replica_time import CHUNKS, LARGEST_CHUNK, Replica

WHOLE, CHUNKED, PIPELINED = "whole", "chunked", "pipelined"
_SHORTEST = 64
_GOOD = 1.01


@dataclass(frozen=True, slots=True)
class Choice:
    """One way of cutting: its name, tokens of a chunk (0 for the whole), microseconds."""

    how: str
    chunk: int
    us: float


def choices(replica: Replica, tokens: int, most: int = LARGEST_CHUNK) -> list[Choice]:
    """All ways to cut a prompt of so many tokens, `most` of them in a step."""
    how = PIPELINED if replica.partition.pp > 1 else CHUNKED
    found = []
    if tokens <= most:
        found.append(Choice(WHOLE, 0, replica.prefill_with(tokens, tokens).us))
    for chunk in sorted({*CHUNKS, most}):
        if chunk < tokens and chunk <= most:
            found.append(Choice(how, chunk, replica.prefill_with(tokens, chunk).us))
    return found


def best(replica: Replica, tokens: int, most: int = LARGEST_CHUNK) -> Choice:
    """The fastest way; of equal ones the one with fewest pieces."""
    return min(choices(replica, tokens, most), key=lambda c: (c.us, c.chunk != 0, -c.chunk))


def static_us(replica: Replica, tokens: int, chunk: int) -> float:
    """The same prompt when every prompt is cut into chunks of one size."""
    return replica.prefill_with(tokens, min(chunk, tokens)).us


def prefill_cuts(
    replica: Replica, longest: int, most: int = LARGEST_CHUNK
) -> tuple[PrefillCut, ...]:
    """Ranges of lengths from 1 to `longest` with their cut, shortest first.

    `most` tokens of a prompt fit a step. A cut is kept while no other is more than 1 % faster, so
    that ranges are few. Looked at in steps of a quarter of an octave; the crossover between two is
    found by halving.
    """
    lengths = _ladder(longest)
    found = [(1, best(replica, lengths[0], most))]  # (first length of a range, its cut)
    for last, tokens in pairwise(lengths):
        while not _holds(replica, found[-1][1], tokens, most):
            low, high = max(last, found[-1][0]), tokens
            while high - low > 1:
                middle = (low + high) // 2
                if _holds(replica, found[-1][1], middle, most):
                    low = middle
                else:
                    high = middle
            found.append((high, best(replica, high, most)))
    ends = [low - 1 for low, _ in found[1:]] + [longest]
    return tuple(
        PrefillCut(low, high, c.how, c.chunk, _us(replica, c, high) / 1e3)
        for (low, c), high in zip(found, ends, strict=True)
    )


def _holds(replica: Replica, choice: Choice, tokens: int, most: int) -> bool:
    """Whether a cut is possible for so many tokens, and as good as any other."""
    if choice.chunk >= tokens or (choice.how == WHOLE and tokens > most):
        return False
    return _us(replica, choice, tokens) <= _GOOD * best(replica, tokens, most).us


def _us(replica: Replica, choice: Choice, tokens: int) -> float:
    return replica.prefill_with(tokens, choice.chunk or tokens).us


def cut_for(cuts: tuple[PrefillCut, ...], tokens: int) -> PrefillCut:
    """The cut of a prompt of so many tokens."""
    return next((c for c in cuts if c.low_tokens <= tokens <= c.high_tokens), cuts[-1])


def _ladder(longest: int) -> list[int]:
    found, size = [], float(min(_SHORTEST, longest))
    while size < longest:
        found.append(round(size))
        size *= 2**0.25
    return sorted({*found, longest})
