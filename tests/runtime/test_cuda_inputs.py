"""Uploads through pinned memory that is smaller than what a step writes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sitsc.runtime.cuda_inputs import Upload

PINNED, OFFSET = 256, 128


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often an upload has waited for the stream."""
    found: list[int] = []
    stream = SimpleNamespace(synchronize=lambda: found.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return found


def upload_to(dtype: str, count: int) -> tuple[Any, torch.Tensor]:
    """An upload to a buffer of so many elements in the middle of an arena, and that arena."""
    nbytes = count * np.dtype(dtype).itemsize
    arena = torch.zeros(OFFSET + nbytes + 64, dtype=torch.uint8)
    buffer = SimpleNamespace(dtype=dtype, bytes=nbytes, offset=OFFSET)
    stage = SimpleNamespace(memory=torch.zeros(PINNED, dtype=torch.uint8))
    memory = SimpleNamespace(arena=arena, buffer=lambda name: buffer)
    return Upload(memory, stage), arena  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 65, 1000])
def test_values_of_any_length_arrive_whole(dtype: str, count: int, waits: list[int]) -> None:
    upload, arena = upload_to(dtype, count + 3)
    values = np.arange(1, count + 1)
    upload.put("block_table", values, 2)
    end = OFFSET + (count + 3) * np.dtype(dtype).itemsize
    found = arena[OFFSET:end].numpy().view(dtype)
    assert found.tolist() == [0, 0, *values.tolist(), 0]
    assert not arena[:OFFSET].any() and not arena[end:].any()
    pieces = -(-count * np.dtype(dtype).itemsize // PINNED)
    assert len(waits) == max(0, pieces - 1)  # the pinned memory is used again, once it was copied


def test_short_values_share_the_pinned_memory(waits: list[int]) -> None:
    upload, _ = upload_to("int32", 100)
    for _ in range(4):
        upload.put("block_table", np.arange(16))
    assert not waits
    upload.put("block_table", np.arange(1))
    assert waits == [1]


def test_more_than_is_planned_is_refused(waits: list[int]) -> None:
    upload, _ = upload_to("int32", 100)
    with pytest.raises(AssertionError, match="planned too small"):
        upload.put("block_table", np.arange(100), 1)
