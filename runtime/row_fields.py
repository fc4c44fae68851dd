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
from sitsc.core.plan import Plan

_HEAD = 3  # whole numbers before the bytes of a copy: buffer, first element, bytes
FIELDS = ("temperature", "top_k", "top_p", "min_p", "penalty", "seed", "step", "suppress")
FIELDS += ("has_mask", "slot")
_BUFFERS = (*FIELDS, "mask", "seen")
Field = tuple[str, npt.NDArray[Any], int]


class RecordedFields:
    """Takes copies as `Upload.put` does, and keeps them."""

    def __init__(self, plan: Plan) -> None:
        self._dtypes, self._data = _dtypes(plan), bytearray()

    def put(self, name: str, values: npt.NDArray[Any], start: int = 0) -> None:
        """Keep the copy of values to elements `start` … of a buffer."""
        raw = values.astype(self._dtypes[name]).tobytes()
        self._data += np.array([_BUFFERS.index(name), start, len(raw)], np.int64).tobytes() + raw

    def tensor(self) -> Tensor:
        """The message [bytes] uint8."""
        if not self._data:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._data, dtype=torch.uint8)


def read_fields(plan: Plan, message: Tensor) -> Iterator[Field]:
    """(buffer, values, first element) of each copy. Raises ExecutionError for odd messages."""
    dtypes, raw, at = _dtypes(plan), message.numpy().tobytes(), 0
    while at < len(raw):
        if at + 8 * _HEAD > len(raw):
            raise ExecutionError("fields of rows were cut short", hint="start all anew")
        number, start, nbytes = np.frombuffer(raw, np.int64, _HEAD, at).tolist()
        at += 8 * _HEAD
        if not 0 <= number < len(_BUFFERS) or at + nbytes > len(raw):
            raise ExecutionError("fields of rows do not fit the plan", hint="start all anew")
        name = _BUFFERS[number]
        dtype = dtypes[name]
        yield name, np.frombuffer(raw, dtype, nbytes // dtype.itemsize, at), start
        at += nbytes


def _dtypes(plan: Plan) -> dict[str, np.dtype[Any]]:
    return {b.name: np.dtype(b.dtype) for b in plan.memory.arena if b.name in _BUFFERS}
