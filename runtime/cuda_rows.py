"""The fields of the sampled rows on the device: written when a row's request or mask changes.

In: the sampler's rows of a step. Out: the arena's per-row fields and bitmaps. While the same rows
go on, the kernels count steps and keep the seen ids themselves, and nothing is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.core.serving.sampling_rows import (
    SamplingRow,
    bitmap_of_flags,
    bitmap_of_ids,
    request_seed,
    sampling_row,
)
from sitsc.runtime.cuda_inputs import Upload
from sitsc.runtime.row_fields import FIELDS, RecordedFields
from sitsc.runtime.sampler import SamplerRow

_IDLE = SamplingRow()
Copies = Upload | RecordedFields


@dataclass(slots=True)
class _Kept:
    """What a request keeps as long as it lives."""

    seed: int
    slot: int = -1  # of its bitmap of seen ids, once it has one


class DeviceRows:
    """Writes the rows of `most` sequences; ids from `vocabulary` on are padding."""

    def __init__(self, most: int, vocabulary: int) -> None:
        self._most, self._vocabulary = most, vocabulary
        self._kept: dict[int, _Kept] = {}
        self._free = list(range(most - 1, -1, -1))
        self._written: tuple[int, ...] | None = None  # whose fields the rows hold
        self._masked = False
        self._plain = 0  # leading rows that are known to be plain
        self.draws = False  # whether a row of the last step has a temperature

    def reset(self, upload: Upload) -> None:
        """Make all rows idle."""
        self._put(upload, [_IDLE] * self._most)
        self._plain, self._written, self._masked = self._most, None, False
        self.draws = False

    def forget(self, request_id: int) -> None:
        """Give back what an ended request kept."""
        kept = self._kept.pop(request_id, None)
        if kept is not None and kept.slot >= 0:
            self._free.append(kept.slot)

    def write(
        self, upload: Copies, batch: StepBatch, rows: Sequence[SamplerRow], bucket: int
    ) -> None:
        """Make the first `bucket` rows those of a step; all past `rows` idle."""
        ids = batch.sampled_ids
        masked = any(row.mask is not None for row in rows)
        if ids == self._written and not masked and not self._masked:
            return
        fields = [self._row(upload, batch, *pair) for pair in zip(ids, rows, strict=True)]
        self._written, self._masked = ids, masked
        self.draws = any(field.temperature for field in fields)
        plain = all(field.is_plain for field in fields)
        if plain and bucket <= self._plain:
            return  # rows of other requests, but the same fields
        self._put(upload, fields + [_IDLE] * (bucket - len(fields)))
        self._plain = max(self._plain, bucket) if plain else 0
        for index, row in enumerate(rows):
            if row.mask is not None:
                words = bitmap_of_flags(row.mask[: self._vocabulary].numpy())
                upload.put("mask", words, index * len(words))

    @staticmethod
    def _put(upload: Copies, fields: Sequence[SamplingRow]) -> None:
        for name in FIELDS:
            upload.put(name, np.array([getattr(field, name) for field in fields]))

    def _row(
        self, upload: Copies, batch: StepBatch, request_id: int, row: SamplerRow
    ) -> SamplingRow:
        kept = self._kept.get(request_id)
        if kept is None:
            kept = self._kept[request_id] = _Kept(request_seed(row.options))
        place = batch.query_start[batch.request_ids.index(request_id) + 1] - 1
        pending = batch.token_ids[place] == UNKNOWN
        field = sampling_row(
            row.options,
            seed=kept.seed,
            num_generated=len(row.history) - row.num_prompt_tokens + pending,
            vocabulary=self._vocabulary,
            slot=max(kept.slot, 0),
            has_mask=row.mask is not None,
        )
        if field.needs_seen and kept.slot < 0:
            kept.slot = self._free.pop()
            words = bitmap_of_ids(row.history, self._vocabulary)
            upload.put("seen", words, kept.slot * len(words))
            return self._row(upload, batch, request_id, row)
        return field
