"""Memory of one device as planned: weights, arena and KV pools, one allocation each.

In: an artifact. Out: tensors at planned places. Nothing is allocated beyond the plan.
"""

import contextlib
import math
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError
from sitsc.core.plan import ArenaBuffer, KvGroup, Memory
from sitsc.core.weights import DTYPES, WeightSpec

_ALIGNMENT = 64
_HUGE_PAGE = 1 << 21
_PIECE, _READERS = 1 << 24, 4


def huge_block(nbytes: int) -> Tensor:
    """Memory of its own in huge pages where the system has them; touched only when used.

    Streaming weights from 4 KiB pages costs a third of the bandwidth.
    """
    rounded = max(1, -(-nbytes // _HUGE_PAGE)) * _HUGE_PAGE
    block = mmap.mmap(-1, rounded)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages serves small ones
            block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=torch.uint8)[:nbytes]


def read_weights(artifact: Artifact) -> dict[str, Tensor]:
    """Every planned weight, read from the weights file into one block by several threads."""
    index = artifact.stored_weights()
    name = artifact.weights
    path = artifact.file(name)
    size = artifact.manifest.files[name].bytes
    whole = huge_block(size)
    view = whole.numpy().data
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(_READERS) as pool:

        def read(start: int) -> int:
            return os.preadv(file.fileno(), [view[start : start + _PIECE]], start)

        starts = range(0, size, _PIECE)
        counts = list(pool.map(read, starts))
    if any(count < min(_PIECE, size - s) for count, s in zip(counts, starts, strict=True)):
        raise ArtifactError(f"{name} cannot be read whole", where=artifact.root.name)
    weights = {}
    for spec in artifact.plan.model.parameters:
        place = index.get(spec.name)
        if place is None or place.bytes != spec.nbytes or place.offset + place.bytes > size:
            raise ArtifactError(f"weight {spec.name} is not in {name}", where=artifact.root.name)
        weights[spec.name] = shaped(whole[place.offset : place.offset + place.bytes], spec)
    return weights


def shaped(raw: Tensor, spec: WeightSpec) -> Tensor:
    """Bytes as the tensor that a spec describes."""
    return raw.view(DTYPES[spec.dtype]).view(spec.stored_shape)


class Arena:
    """The arena: one allocation, buffers at their planned offsets."""

    def __init__(self, memory: Memory) -> None:
        self._block = torch.zeros(memory.arena_bytes + _ALIGNMENT, dtype=torch.uint8)
        self._start = -self._block.data_ptr() % _ALIGNMENT
        self._buffers = {buffer.name: buffer for buffer in memory.arena}

    def buffer(self, name: str) -> ArenaBuffer:
        """The plan of a buffer."""
        return self._buffers[name]

    def view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The first elements of a buffer as a contiguous tensor of `shape`."""
        buffer = self._buffers[name]
        dtype = DTYPES[buffer.dtype]
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > buffer.bytes:
            raise ValueError(f"{name}: {nbytes} bytes asked for, {buffer.bytes} planned")
        start = self._start + buffer.offset
        return self._block[start : start + nbytes].view(dtype).view(shape)


def allocate_pool(group: KvGroup, pages: int) -> Tensor:
    """The KV pool of a group: [pages, layers, 2, kv_heads, head_dim * page_tokens]."""
    shape = (pages, len(group.layers), 2, group.kv_heads, group.head_dim * group.page_tokens)
    dtype = DTYPES[group.dtype]
    return huge_block(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
