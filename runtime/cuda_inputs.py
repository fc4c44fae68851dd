"""The inputs of a step on their way to the device: written once, only where they changed.

In: a `StepBatch`. Out: the arena's input buffers, filled by asynchronous copies from pinned memory
on the step's stream. While decode steps repeat for the same requests the kernels advance tokens,
positions and lengths themselves, and only new pages are written.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.runtime.cuda_memory import CudaMemory

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


class Upload:
    """Copies of one step to planned buffers, asynchronous, from pinned memory."""

    def __init__(self, memory: CudaMemory, stage: _Stage) -> None:
        self._memory, self._stage, self._used = memory, stage, 0

    def put(self, name: str, values: npt.NDArray[Any], start: int = 0) -> None:
        """Copy values to elements `start` … of a buffer, in pieces of all the pinned memory."""
        buffer = self._memory.buffer(name)
        dtype = np.dtype(buffer.dtype)
        end = (start + len(values)) * dtype.itemsize
        assert end <= buffer.bytes, f"{name} is planned too small"
        most = len(self._stage.memory) // dtype.itemsize
        for first in range(0, len(values), most):
            offset = buffer.offset + (start + first) * dtype.itemsize
            self._copy(values[first : first + most], dtype, offset)

    def _copy(self, values: npt.NDArray[Any], dtype: np.dtype[Any], offset: int) -> None:
        nbytes, whole = len(values) * dtype.itemsize, self._stage.memory
        if self._used + nbytes > len(whole):  # masks, long block tables: wait, and use it again
            torch.cuda.current_stream().synchronize()
            self._used = 0
        part = whole[self._used : self._used + nbytes]
        part.numpy().view(dtype)[:] = values
        self._memory.arena[offset : offset + nbytes].copy_(part, non_blocking=True)
        self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Uploads:
    """Pinned memory for the uploads of a few steps in turn, those that `ahead` steps wait for."""

    def __init__(self, memory: CudaMemory, nbytes: int, ahead: int = 1) -> None:
        self._memory, self._turn = memory, 0
        self._ring = [
            _Stage(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            for _ in range(_RING - 1 + ahead)
        ]

    @contextlib.contextmanager
    def begin(self) -> Iterator[Upload]:
        """The uploads of one step, to the current stream of torch."""
        stage = self._ring[self._turn]
        self._turn = (self._turn + 1) % len(self._ring)
        stage.copied.synchronize()
        try:
            yield Upload(self._memory, stage)
        finally:
            stage.copied.record()


class StepInputs:
    """Fills the input buffers of a plan."""

    def __init__(self, memory: CudaMemory) -> None:
        rows, self.width = memory.buffer("block_table").shape
        self._table = np.zeros((rows, self.width), np.int32)
        self._lengths: list[int] = []
        self._ids: tuple[int, ...] = ()
        self._bucket = 0

    def forget_layout(self) -> None:
        """The next decode step is written whole."""
        self._ids = ()

    def decode(self, upload: Upload, batch: StepBatch, bucket: int, sources: dict[int, int]) -> int:
        """Inputs of a decode step in a bucket; how many tokens `place` has to fetch.

        `sources` are rows of the last sampled ids by request. Rows past the batch are idle.
        """
        if batch.request_ids == self._ids and bucket == self._bucket:
            self._more_pages(upload, batch.block_tables)
            return 0
        count = len(batch.request_ids)
        self._lengths = []
        for row, table in enumerate(batch.block_tables):
            self._table[row, : len(table)] = table
            self._lengths.append(len(table))
        lengths = np.full(bucket, IDLE, np.int32)
        lengths[:count] = batch.context_lens
        upload.put("context_lens", lengths)
        upload.put("position_ids", np.maximum(lengths, 0))
        upload.put("token_ids", _padded(batch.token_ids, bucket))
        upload.put("block_table", self._table[:bucket].reshape(-1))
        placed = self._unknown(upload, batch, range(count), sources)
        self._ids, self._bucket = batch.request_ids, bucket
        return placed

    def prefill(
        self, upload: Upload, batch: StepBatch, rows: Sequence[int], sources: dict[int, int]
    ) -> tuple[dict[str, int], int]:
        """Inputs of a ragged step; its sizes by name and how many tokens `place` has to fetch."""
        self._ids = ()
        tokens, sequences = len(batch.token_ids), len(batch.request_ids)
        spans = zip(batch.context_lens, pairwise(batch.query_start), strict=True)
        positions = [np.arange(n, n + stop - start) for n, (start, stop) in spans]
        table = np.zeros((sequences, self.width), np.int32)
        for row, pages in enumerate(batch.block_tables):
            table[row, : len(pages)] = pages
        upload.put("token_ids", np.maximum(np.array(batch.token_ids), 0))
        upload.put("position_ids", np.concatenate(positions))
        upload.put("logit_rows", np.array(rows))
        upload.put("query_start", np.array(batch.query_start))
        upload.put("context_lens", np.array(batch.context_lens))
        upload.put("block_table", table.reshape(-1))
        places = [stop - 1 for stop in batch.query_start[1:]]
        placed = self._unknown(upload, batch, places, sources)
        sizes = {"tokens": tokens, "sequences": sequences, "rows": len(rows)}
        return sizes | {"sequence_pages": self.width}, placed

    def _unknown(
        self, upload: Upload, batch: StepBatch, places: Sequence[int], sources: dict[int, int]
    ) -> int:
        """Where the tokens that only the device knows lie, and where they belong."""
        pairs = [
            (sources[request], place)
            for request, place in zip(batch.request_ids, places, strict=True)
            if batch.token_ids[place] == UNKNOWN
        ]
        if pairs:
            upload.put("token_sources", np.array([source for source, _ in pairs]))
            upload.put("token_places", np.array([place for _, place in pairs]))
        return len(pairs)

    def _more_pages(self, upload: Upload, tables: Sequence[Sequence[int]]) -> None:
        """Write the pages that the sequences of an unchanged step have got since."""
        added: list[tuple[int, int, int]] = []
        for row, (table, known) in enumerate(zip(tables, self._lengths, strict=True)):
            if len(table) > known:
                self._table[row, known : len(table)] = table[known:]
                added.append((row, known, len(table)))
                self._lengths[row] = len(table)
        if not added:
            return
        if len(added) > _FEW_PAGES:
            upload.put("block_table", self._table[: len(tables)].reshape(-1))
        else:
            for row, start, stop in added:
                part = self._table[row, start:stop]
                upload.put("block_table", part, row * self.width + start)


def _padded(values: Sequence[int], count: int) -> Numbers:
    padded = np.zeros(count, np.int64)
    padded[: len(values)] = np.maximum(values, 0)
    return padded
