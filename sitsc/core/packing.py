"""Packing: every planned weight buffer streamed into one file, one buffer in memory at a time.

In: the specs of a plan and a reader of checkpoint rows. Out: the weights file and its index.
Offsets and length are multiples of 64 bytes, so that kernels may use the mapped file as it is.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sitsc.core.artifact import StoredWeight
from sitsc.core.weights import WeightSpec, materialise

ALIGNMENT = 64


def write_weights(
    specs: tuple[WeightSpec, ...],
    read: Callable[[str, int, int], Tensor],
    path: Path,
    progress: Callable[[int], None],
) -> list[StoredWeight]:
    """Write all buffers to `path`; `progress(bytes)` after each. Returns the index."""
    index: list[StoredWeight] = []
    with path.open("wb") as file:
        for spec in specs:
            file.write(b"\0" * (-file.tell() % ALIGNMENT))
            offset = file.tell()
            tensor = materialise(spec, read).contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            index.append(StoredWeight(spec.name, offset, spec.nbytes))
            progress(spec.nbytes)
        file.write(b"\0" * (-file.tell() % ALIGNMENT))
    return index
