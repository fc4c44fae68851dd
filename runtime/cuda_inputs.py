"""The inputs of a step on their way to the device: written once, only where they changed.

In: a `StepBatch`. Out: the arena's input buffers, filled by asynchronous copies from pinned memory
on the step's stream. While decode steps repeat for the same requests the kernels advance tokens,
positions and lengths themselves, and only new pages are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from sitsc.core.plan import ArenaBuffer
from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.runtime.cuda_memory import CudaMemory

NAMES = (
    "token_ids",
    "position_ids",
    "logit_rows",
    "block_table",
    "query_start",
    "context_lens",
    "token_sources",
    "token_places",
)
IDLE = -1
_RING = 3
_FEW_PAGES = 4
_ALIGNMENT = 64
Numbers = npt.NDArray[np.integer]


@dataclass(slots=True)
class _Stage:
    """Pinned memory that one step copies from, until `copied`."""

    memory: torch.Tensor
    copied: torch.cuda.Event
    used: int = 0


class StepInputs:
    """Fills the input buffers of a plan. All copies go to the current stream of torch."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory = memory
        self._buffers = {name: memory.buffer(name) for name in NAMES}
        nbytes = sum(b.bytes + _ALIGNMENT for b in self._buffers.values())
        self._ring = [
            _Stage(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(_RING)
        ]
        self._turn = 0
        rows, self.width = self._buffers["block_table"].shape
        self._table = np.zeros((rows, self.width), np.int32)
        self._lengths: list[int] = []
        self._ids: tuple[int, ...] = ()
        self._bucket = 0

    def forget_layout(self) -> None:
        """The next decode step is written whole."""
        self._ids = ()

    def decode(self, batch: StepBatch, bucket: int, sources: dict[int, int]) -> int:
        """Inputs of a decode step in a bucket; how many tokens `place` has to fetch.

        `sources` are rows of the last sampled ids by request. Rows past the batch are idle.
        """
        if batch.request_ids == self._ids and bucket == self._bucket:
            self._more_pages(batch.block_tables)
            return 0
        stage = self._begin()
        count = len(batch.request_ids)
        self._lengths = []
        for row, table in enumerate(batch.block_tables):
            self._table[row, : len(table)] = table
            self._lengths.append(len(table))
        lengths = np.full(bucket, IDLE, np.int32)
        lengths[:count] = batch.context_lens
        self._put(stage, "context_lens", lengths)
        self._put(stage, "position_ids", np.maximum(lengths, 0))
        self._put(stage, "token_ids", _padded(batch.token_ids, bucket))
        self._put(stage, "block_table", self._table[:bucket].reshape(-1))
        placed = self._unknown(stage, batch, range(count), sources)
        self._end(stage)
        self._ids, self._bucket = batch.request_ids, bucket
        return placed

    def prefill(
        self, batch: StepBatch, rows: Sequence[int], sources: dict[int, int]
    ) -> tuple[dict[str, int], int]:
        """Inputs of a ragged step; its sizes by name and how many tokens `place` has to fetch."""
        self._ids = ()
        stage = self._begin()
        tokens, sequences = len(batch.token_ids), len(batch.request_ids)
        spans = zip(batch.context_lens, pairwise(batch.query_start), strict=True)
        positions = [np.arange(n, n + stop - start) for n, (start, stop) in spans]
        table = np.zeros((sequences, self.width), np.int32)
        for row, pages in enumerate(batch.block_tables):
            table[row, : len(pages)] = pages
        self._put(stage, "token_ids", np.maximum(np.array(batch.token_ids), 0))
        self._put(stage, "position_ids", np.concatenate(positions))
        self._put(stage, "logit_rows", np.array(rows))
        self._put(stage, "query_start", np.array(batch.query_start))
        self._put(stage, "context_lens", np.array(batch.context_lens))
        self._put(stage, "block_table", table.reshape(-1))
        places = [stop - 1 for stop in batch.query_start[1:]]
        placed = self._unknown(stage, batch, places, sources)
        self._end(stage)
        sizes = {"tokens": tokens, "sequences": sequences, "rows": len(rows)}
        return sizes | {"sequence_pages": self.width}, placed

    def _unknown(
        self, stage: _Stage, batch: StepBatch, places: Sequence[int], sources: dict[int, int]
    ) -> int:
        """Where the tokens that only the device knows lie, and where they belong."""
        pairs = [
            (sources[request], place)
            for request, place in zip(batch.request_ids, places, strict=True)
            if batch.token_ids[place] == UNKNOWN
        ]
        if pairs:
            self._put(stage, "token_sources", np.array([source for source, _ in pairs]))
            self._put(stage, "token_places", np.array([place for _, place in pairs]))
        return len(pairs)

    def _more_pages(self, tables: Sequence[Sequence[int]]) -> None:
        """Write the pages that the sequences of an unchanged step have got since."""
        added: list[tuple[int, int, int]] = []
        for row, (table, known) in enumerate(zip(tables, self._lengths, strict=True)):
            if len(table) > known:
                self._table[row, known : len(table)] = table[known:]
                added.append((row, known, len(table)))
                self._lengths[row] = len(table)
        if not added:
            return
        stage = self._begin()
        if len(added) > _FEW_PAGES:
            self._put(stage, "block_table", self._table[: len(tables)].reshape(-1))
        else:
            for row, start, stop in added:
                part = self._table[row, start:stop]
                self._put(stage, "block_table", part, row * self.width + start)
        self._end(stage)

    def _begin(self) -> _Stage:
        stage = self._ring[self._turn]
        self._turn = (self._turn + 1) % _RING
        stage.copied.synchronize()
        stage.used = 0
        return stage

    def _put(self, stage: _Stage, name: str, values: Numbers, start: int = 0) -> None:
        """Copy values to elements `start` … of a buffer."""
        buffer = self._buffers[name]
        dtype = _numpy(buffer)
        nbytes = len(values) * dtype.itemsize
        at = start * dtype.itemsize
        assert at + nbytes <= buffer.bytes, f"{name} is planned too small"
        part = stage.memory[stage.used : stage.used + nbytes]
        part.numpy().view(dtype)[:] = values
        offset = buffer.offset + at
        self._memory.arena[offset : offset + nbytes].copy_(part, non_blocking=True)
        stage.used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    def _end(self, stage: _Stage) -> None:
        stage.copied.record()


def _padded(values: Sequence[int], count: int) -> Numbers:
    padded = np.zeros(count, np.int64)
    padded[: len(values)] = np.maximum(values, 0)
    return padded


def _numpy(buffer: ArenaBuffer) -> np.dtype[np.integer]:
    return np.dtype(buffer.dtype)
