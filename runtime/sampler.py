"""Draws one token a row from logits on the CPU, each row by its own request's options.

The order is repetition penalty, suppressed end of text, mask, temperature, top_k, top_p, min_p,
softmax, draw. A row's token depends on its logits, its options and its generator alone, never on
its neighbours. A row that cannot be drawn is an error of that request, returned in its place.
One row is too little work to share between threads: it is done in numpy, on one.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sitsc.core.errors import SamplingError
from sitsc.core.sampling import SamplingOptions

Floats = npt.NDArray[np.floating]
Ids = npt.NDArray[np.intp]


@dataclass(slots=True)
class SamplerRow:
    """What the sampler must know of one request. `history` is prompt and answer so far (live)."""

    options: SamplingOptions
    history: Sequence[int]
    num_prompt_tokens: int
    generator: torch.Generator | None = None  # None only when greedy
    mask: torch.Tensor | None = None  # bool [width], True: allowed

    @classmethod
    def begin(
        cls, options: SamplingOptions, history: Sequence[int], num_prompt_tokens: int
    ) -> "SamplerRow":
        """A row with its own random state, from `options.seed` or from the system's entropy."""
        generator = None
        if not options.is_greedy:
            generator = torch.Generator()
            generator.seed() if options.seed is None else generator.manual_seed(options.seed)
        return cls(options, history, num_prompt_tokens, generator)


class Sampler:
    """Samples ids below `vocab_size`; logits may be wider (padded)."""

    def __init__(
        self, vocab_size: int, logits_width: int | None = None, eos_ids: Collection[int] = ()
    ) -> None:
        self.vocab_size = vocab_size
        self.logits_width = vocab_size if logits_width is None else logits_width
        assert 0 < self.vocab_size <= self.logits_width
        self._eos_ids = np.array([i for i in sorted(eos_ids) if i < vocab_size], dtype=np.intp)

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[int | SamplingError]:
        """One token or error a row; `logits` is [rows, width], any float dtype, on the CPU."""
        assert logits.shape == (len(rows), self.logits_width), "one row of logits a request"
        values: Floats = logits.detach().float().numpy()[:, : self.vocab_size]
        results: list[int | SamplingError] = []
        for scores, row in zip(values, rows, strict=True):
            try:
                results.append(self._draw(scores, row))
            except SamplingError as error:
                results.append(error)
        return results

    def _draw(self, scores: Floats, row: SamplerRow) -> int:
        """The token of one row; `scores` [vocab_size] is fp32 and is not written to."""
        best = int(scores.argmax())  # the lowest id of the largest; NaN counts as the largest
        if not math.isfinite(scores[best]):
            raise SamplingError("the logits are not finite", hint="run `sitsc verify` on the model")
        changed = self._adjust(scores, row)
        if changed is not None:
            scores = changed
            best = int(scores.argmax())
            if scores[best] == -math.inf:
                raise SamplingError("no token is allowed", hint="the mask leaves none over")
            if not math.isfinite(scores[best]):
                raise SamplingError("the logits are not finite after the repetition penalty")
        if row.options.is_greedy:
            return best
        assert row.generator is not None, "a drawing row needs a generator"
        ids, weights = candidates(scores, row.options)
        index = _pick(weights, float(torch.rand((), generator=row.generator, dtype=torch.float64)))
        return index if ids is None else int(ids[index])

    def _adjust(self, scores: Floats, row: SamplerRow) -> Floats | None:
        """A changed copy of the scores, or None when this row changes nothing."""
        penalty = row.options.repetition_penalty
        num_generated = len(row.history) - row.num_prompt_tokens
        suppress = num_generated < row.options.min_tokens and len(self._eos_ids)
        if penalty == 1 and not suppress and row.mask is None:
            return None
        scores = scores.copy()
        if penalty != 1:
            seen = np.array(row.history, dtype=np.intp)
            seen = seen[seen < self.vocab_size]
            values = scores[seen]
            with np.errstate(over="ignore"):  # what overflows is told by the caller
                scores[seen] = np.where(values < 0, values * penalty, values / penalty)
        if suppress:
            scores[self._eos_ids] = -np.inf
        if row.mask is not None:
            if row.mask.dtype != torch.bool or row.mask.shape != (self.logits_width,):
                raise SamplingError(f"the mask must be bool [{self.logits_width}]")
            scores[~row.mask.numpy()[: self.vocab_size]] = -np.inf
        return scores


def candidates(scores: Floats, options: SamplingOptions) -> tuple[Ids | None, Floats]:
    """The ids that survive temperature, top_k, top_p and min_p, and their weights.

    `scores` is fp32 [vocab_size] with a finite maximum; ids None means all of them, in order. The
    weights are proportional to the probabilities of the survivors, the largest is 1.
    """
    with np.errstate(over="ignore"):  # far below the best is -inf, weight 0
        scores = (scores - scores.max()) / np.float32(options.temperature)
    ids: Ids | None = None
    if 0 < options.top_k < len(scores):
        # Those equal to the last one stay.
        ids = np.flatnonzero(scores >= _kth_largest(scores, options.top_k))
        scores = scores[ids]
    weights = np.exp(scores)
    for choose, limit in ((_nucleus, options.top_p), (_likely, options.min_p)):
        kept = choose(weights, limit)
        if kept is not None:
            ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _kth_largest(scores: Floats, k: int) -> float:
    """The k-th largest score, 1 <= k <= len(scores)."""
    groups = len(scores) // 64
    if k <= groups:  # k groups hold a score of at least their k-th largest maximum: few are left
        maxima = scores[: groups * 64].reshape(64, groups).max(axis=0)
        scores = scores[scores >= np.partition(maxima, -k)[-k]]
    return np.partition(scores, -k)[-k]


def _nucleus(weights: Floats, top_p: float) -> Ids | None:
    """Indices of the largest weights whose predecessors sum to less than `top_p` of all.

    Of equal weights the lowest ids go first; the values are sorted, not the ids, so that the
    choice does not hang on the sorting algorithm.
    """
    if top_p == 1:
        return None
    total = weights.sum(dtype=np.float64)
    # What is lighter than this sums to less than 1 - top_p: it is out, and need not be sorted.
    head = weights[weights >= (1 - top_p) * total / len(weights)]
    falling = np.sort(head)[::-1].astype(np.float64)
    num = np.count_nonzero(falling.cumsum() - falling < top_p * total)
    kept = np.flatnonzero(weights >= falling[num - 1])
    surplus = len(kept) - num
    if surplus > 0:
        equal = np.flatnonzero(weights[kept] == falling[num - 1])
        kept = np.delete(kept, equal[-surplus:])
    return kept


def _likely(weights: Floats, min_p: float) -> Ids | None:
    """Indices of the weights of at least `min_p` of the largest."""
    return np.flatnonzero(weights >= min_p * weights.max()) if min_p > 0 else None


def _pick(weights: Floats, point: float) -> int:
    """The index whose share of the weights holds `point`, in [0, 1); never one of weight 0."""
    sums = weights.cumsum(dtype=np.float64)
    index = int(sums.searchsorted(point * sums[-1], side="right"))
    return min(index, int(sums.searchsorted(sums[-1])))  # rounding may reach the end
