"""How finely to cut work that is overlapped: communication, prompts, batches.

In: what a piece costs, by measured latency and bandwidth. Out: the size of a piece, with the range
of sizes that are about as good. The closed form is where the search over real sizes begins.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sitsc.core.links import Link, seconds
from sitsc.core.plan import Granularity

_NEAR = 1.05  # sizes within 5 % of the best belong to its range
_MOST_PIECES = 64
_BULK = ("ring", "two_shot", "tree", "one_shot", "gathered_sum")
_MESSAGES = (1 << 18, 1 << 22, 1 << 26)  # bytes to split: a decode batch, a chunk, a long prompt


@dataclass(frozen=True, slots=True)
class Pieces:
    """The best number of pieces, the size of one, its time and that of the whole in one piece.

    Sizes from `low` to `high` take at most 5 % longer than the best.
    """

    count: int
    size: int
    us: float
    whole_us: float
    low: int
    high: int


def piece_seconds(
    size: float, total: float, ranks: int, fixed_s: float, per_byte_s: float
) -> float:
    """T(s) = τ·W / (s·p) + α·s·log2 p: pieces of `size` bytes, of `total`, over `ranks` >= 2."""
    return fixed_s * total / (size * ranks) + per_byte_s * size * math.log2(ranks)


def best_size(total: float, ranks: int, fixed_s: float, per_byte_s: float) -> float:
    """s* = sqrt(τ·W / (α·p·log2 p)), where T(s) is least; `total` itself for one rank.

    `fixed_s` is the fixed cost of a piece, `per_byte_s` the time of a byte. Never beyond `total`.
    """
    if ranks < 2 or per_byte_s <= 0:
        return total
    return min(total, math.sqrt(fixed_s * total / (per_byte_s * ranks * math.log2(ranks))))


def size_range(total: float, ranks: int, fixed_s: float, per_byte_s: float) -> tuple[float, float]:
    """Sizes whose T(s) is within 5 % of the least, cut at `total`.

    T(k·s*) / T(s*) is (k + 1/k) / 2, whatever the numbers are.
    """
    best = best_size(total, ranks, fixed_s, per_byte_s)
    wide = _NEAR + math.sqrt(_NEAR**2 - 1)
    return best / wide, min(total, best * wide)


def link_ranges(link: Link, ranks: int) -> tuple[Granularity, ...]:
    """Sizes of pieces of messages of three sizes over a link, by its bulk algorithm."""
    if ranks < 2:
        return ()
    name = next((n for n in _BULK if n in link.algorithms), "")
    if not name:
        return ()
    algorithm = link.algorithms[name]
    fixed = seconds(algorithm, name, 0, ranks)
    per_byte = seconds(algorithm, name, 1e9, ranks) / 1e9 - fixed / 1e9
    found = []
    for total in _MESSAGES:
        low, high = size_range(total, ranks, fixed, per_byte)
        best = best_size(total, ranks, fixed, per_byte)
        found.append(Granularity(link.name, ranks, total, round(best), round(low), round(high)))
    return tuple(found)


def two_stage_us(compute_us: float, comm_us: float, pieces: int) -> float:
    """Pieces computed one after the other, each sent while the next is computed."""
    return compute_us + (pieces - 1) * max(compute_us, comm_us) + comm_us


def search_pieces(
    total: int,
    sizes: Sequence[int],
    cost: Callable[[int, int], float],
    begin: float = 0.0,
) -> Pieces:
    """The size among `sizes` with the least `cost(size, count)`; the whole is always one of them.

    Begins at the size nearest to `begin` (the closed form) and walks while it gets better, then
    checks the rest: costs of real kernels have more than one valley.
    """
    known = sorted({s for s in sizes if 0 < s < total} | {total})
    known = [s for s in known if -(-total // s) <= _MOST_PIECES] or [total]
    start = min(range(len(known)), key=lambda i: abs(known[i] - (begin or total)))
    order = sorted(range(len(known)), key=lambda i: abs(i - start))
    times = {known[i]: cost(known[i], -(-total // known[i])) for i in order}
    best = min(known, key=lambda s: (times[s], -s))
    near = [s for s in known if times[s] <= _NEAR * times[best]]
    low = high = best
    at = known.index(best)
    while at > 0 and known[at - 1] in near:
        at, low = at - 1, known[at - 1]
    at = known.index(best)
    while at + 1 < len(known) and known[at + 1] in near:
        at, high = at + 1, known[at + 1]
    return Pieces(-(-total // best), best, times[best], times[total], low, high)


def overlapped(
    tokens: int,
    compute: Callable[[int], float],
    comm: Callable[[int], float],
    begin_tokens: float,
    step: int = 64,
) -> Pieces:
    """Tokens of a piece when the sum of one piece travels while the next is computed.

    `compute` and `comm` give the microseconds of so many tokens.
    """
    sizes = [step << i for i in range(16)] + [-(-tokens // n) for n in (2, 3, 4, 6, 8)]

    def cost(size: int, count: int) -> float:
        if count == 1:
            return compute(tokens) + comm(tokens)
        return two_stage_us(compute(size), comm(size), count)

    return search_pieces(tokens, sizes, cost, begin_tokens)


def pipelined_us(times: Sequence[Sequence[float]], send_us: float) -> float:
    """The end of the last piece: `times[piece][stage]`, a stage does one piece at a time."""
    if not times:
        return 0.0
    free = [0.0] * len(times[0])
    for piece in times:
        ready = 0.0
        for stage, us in enumerate(piece):
            ready = max(ready + (send_us if stage else 0.0), free[stage]) + us
            free[stage] = ready
    return free[-1]


def decode_period_us(stages: Sequence[float], send_us: float, micro_batches: int) -> float:
    """Microseconds between two tokens of a sequence when `micro_batches` go round the stages.

    One goes round in the sum of all stages and sends; the slowest stage serves all of them. A
    stage holds one micro-batch at a time, sends overlap with computing others.
    """
    sends = send_us * (len(stages) if len(stages) > 1 else 0)
    return max(sum(stages) + sends, micro_batches * max(stages))
