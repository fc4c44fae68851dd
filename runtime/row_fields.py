"""The fields of sampled rows on their way to the rank that samples.

In: what `DeviceRows` would copy to the device. Out: one message of bytes, and the same copies again
on the other side.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sitsc.core.errors import ExecutionError
from sitsc.core.plan import ArenaBuffer, Plan

_HEAD = 3  # whole numbers before the bytes of a copy: buffer, first element, bytes
FIELDS = ("temperature", "top_k", "top_p", "min_p", "penalty", "seed", "step", "suppress")
FIELDS += ("has_mask", "slot")
_BUFFERS = (*FIELDS, "mask", "seen")
Field = tuple[str, npt.NDArray[Any], int]


class RecordedFields:
    """Takes copies as `Upload.put` does, and keeps them."""

    def __init__(self, plan: Plan) -> None:
        self._buffers, self._data = _buffers(plan), bytearray()

    def put(self, name: str, values: npt.NDArray[Any], start: int = 0) -> None:
        """Keep the copy of values to elements `start` … of a buffer."""
        raw = values.astype(self._buffers[name].dtype).tobytes()
        self._data += np.array([_BUFFERS.index(name), start, len(raw)], np.int64).tobytes() + raw

    def tensor(self) -> Tensor:
        """The message [bytes] uint8."""
        if not self._data:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._data, dtype=torch.uint8)


def read_fields(plan: Plan, message: Tensor) -> Iterator[Field]:
    """(buffer, values, first element) of each copy. Raises ExecutionError for odd messages."""
    buffers, raw, at = _buffers(plan), message.numpy().tobytes(), 0
    while at < len(raw):
        if at + 8 * _HEAD > len(raw):
            raise ExecutionError("fields of rows were cut short", hint="start all anew")
        number, start, nbytes = np.frombuffer(raw, np.int64, _HEAD, at).tolist()
        at += 8 * _HEAD
        name = _BUFFERS[number] if 0 <= number < len(_BUFFERS) else ""
        buffer = buffers.get(name)
        if buffer is None or not _fits(buffer, start, nbytes, len(raw) - at):
            raise ExecutionError("fields of rows do not fit the plan", hint="start all anew")
        dtype = np.dtype(buffer.dtype)
        yield name, np.frombuffer(raw, dtype, nbytes // dtype.itemsize, at), start
        at += nbytes


def _fits(buffer: ArenaBuffer, start: int, nbytes: int, left: int) -> bool:
    """Whether a copy is whole elements inside of its buffer, and its bytes are there."""
    item = np.dtype(buffer.dtype).itemsize
    whole = start >= 0 and 0 <= nbytes <= left and nbytes % item == 0
    return whole and start * item + nbytes <= buffer.bytes


def _buffers(plan: Plan) -> dict[str, ArenaBuffer]:
    return {b.name: b for b in plan.memory.arena if b.name in _BUFFERS}
