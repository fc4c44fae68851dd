"""Draws one token a row from logits on the CPU, each row by its own request's options.

The order is repetition penalty, suppressed end of text, mask, temperature, top_k, top_p, min_p,
softmax, draw. A row's token depends on its logits, its options and its generator alone, never on
its neighbours. A row that cannot be drawn is an error of that request, returned in its place.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sitsc.core.errors import SamplingError
from sitsc.core.sampling import SamplingOptions

_HEAD_TOKENS = 1024  # candidates sorted at first when only top_p filters


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
        self._eos_ids = torch.tensor([i for i in sorted(eos_ids) if i < vocab_size]).long()

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[int | SamplingError]:
        """One token or error a row; `logits` is [rows, width], any float dtype, on the CPU."""
        assert logits.shape == (len(rows), self.logits_width), "one row of logits a request"
        logits = logits.detach().float()
        results: list[int | SamplingError] = []
        for scores, row in zip(logits, rows, strict=True):
            try:
                results.append(self._draw(scores[: self.vocab_size], row))
            except SamplingError as error:
                results.append(error)
        return results

    def _draw(self, scores: torch.Tensor, row: SamplerRow) -> int:
        """The token of one row; `scores` [vocab_size] is fp32 and is not written to."""
        options = row.options
        best, finite = _argmax(scores)
        if not finite:
            raise SamplingError("the logits are not finite", hint="run `sitsc verify` on the model")
        changed = self._adjust(scores, row)
        if changed is not None:
            scores = changed
            best, finite = _argmax(scores)
            if not finite and float(scores[best]) == -torch.inf:
                raise SamplingError("no token is allowed", hint="the mask leaves none over")
            if not finite:
                raise SamplingError("the logits are not finite after the repetition penalty")
        if options.is_greedy:
            return best
        assert row.generator is not None, "a drawing row needs a generator"
        ids, probabilities = candidates(scores, options)
        total = probabilities.double().cumsum(0)
        point = torch.rand((), dtype=torch.float64, generator=row.generator) * total[-1]
        index = int(torch.searchsorted(total, point, right=True))
        index = min(index, int(torch.searchsorted(total, total[-1])))  # rounding up to the end
        return index if ids is None else int(ids[index])

    def _adjust(self, scores: torch.Tensor, row: SamplerRow) -> torch.Tensor | None:
        """A changed copy of the scores, or None when this row changes nothing."""
        penalty = row.options.repetition_penalty
        num_generated = len(row.history) - row.num_prompt_tokens
        suppress = num_generated < row.options.min_tokens and len(self._eos_ids)
        if penalty == 1 and not suppress and row.mask is None:
            return None
        scores = scores.clone()
        if penalty != 1:
            seen = torch.from_numpy(np.unique(np.asarray(row.history, dtype=np.int64)))
            seen = seen[seen < self.vocab_size]
            values = scores[seen]
            scores[seen] = torch.where(values < 0, values * penalty, values / penalty)
        if suppress:
            scores[self._eos_ids] = -torch.inf
        if row.mask is not None:
            if row.mask.dtype != torch.bool or row.mask.shape != (self.logits_width,):
                raise SamplingError(f"the mask must be bool [{self.logits_width}]")
            scores.masked_fill_(~row.mask[: self.vocab_size], -torch.inf)
        return scores


def candidates(
    scores: torch.Tensor, options: SamplingOptions
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The ids that survive temperature, top_k, top_p and min_p, and their weights.

    `scores` is fp32 [vocab_size]; ids None means all of them, in order. The weights are positive
    or zero and proportional to the probabilities of the survivors.
    """
    scores = (scores - scores.max()) / options.temperature  # at most 0: nothing overflows
    ids: torch.Tensor | None = None
    if 0 < options.top_k < len(scores):
        ids = _indices(scores >= scores.topk(options.top_k).values[-1])  # ties stay
        scores = scores[ids]
    weights = scores.softmax(0)
    if options.top_p < 1:
        kept = _nucleus(weights, options.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if options.min_p > 0:
        kept = _indices(weights >= options.min_p * weights.max())
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    return ids, weights


def _nucleus(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Indices of the largest weights whose predecessors sum to less than `top_p`, best first."""
    num = min(len(weights), _HEAD_TOKENS)
    values, order = weights.topk(num)
    before = values.double().cumsum(0) - values
    if num < len(weights) and before[-1] < top_p:
        values, order = weights.sort(descending=True, stable=True)
        before = values.double().cumsum(0) - values
    return order[before < top_p]


def _indices(flags: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.flatnonzero(flags.numpy()))


def _argmax(scores: torch.Tensor) -> tuple[int, bool]:
    """The lowest id of the largest score, and whether that score is finite (NaN is largest)."""
    values = scores.numpy()  # numpy's argmax is ten times faster than torch's here
    best = int(values.argmax())
    return best, bool(np.isfinite(values[best]))
