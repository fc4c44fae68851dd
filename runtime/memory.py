"""Memory of one device as the plan says: the weights, the arena and the KV pools, one allocation each.

In: an artifact. Out: tensors at planned places. Weights are mapped from the artifact, or made from the
checkpoint that the user names; nothing is allocated beyond the plan.
"""

import math
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

from sitsc.core.artifact import WEIGHTS, Artifact
from sitsc.core.errors import ArtifactError
from sitsc.core.plan import ArenaBuffer, KvGroup, Memory
from sitsc.core.weights import DTYPES, WeightSpec

_ALIGNMENT = 64


def map_weights(artifact: Artifact) -> dict[str, Tensor]:
    """Every planned weight as a view of the mapped weights file; no byte is copied."""
    index = artifact.stored_weights()
    path = artifact.file(WEIGHTS)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    weights = {}
    for spec in artifact.plan.model.parameters:
        place = index.get(spec.name)
        if place is None or place.bytes != spec.nbytes:
            raise ArtifactError(f"weight {spec.name} is not in {WEIGHTS}", where=artifact.root.name)
        weights[spec.name] = shaped(whole[place.offset : place.offset + place.bytes], spec)
    return weights


def shaped(raw: Tensor, spec: WeightSpec) -> Tensor:
    """Bytes as the tensor that a spec describes."""
    return raw.view(DTYPES[spec.dtype]).view(spec.stored_shape)


def checkpoint_weights(
    artifact: Artifact, read: Callable[[WeightSpec], Tensor], done: Callable[[int], None]
) -> dict[str, Tensor]:
    """Every planned weight, made by `read`; `done(bytes)` after each."""
    weights = {}
    for spec in artifact.plan.model.parameters:
        weights[spec.name] = read(spec)
        done(spec.nbytes)
    return weights


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
        """The first elements of a buffer as a contiguous tensor of `shape`, within its planned size."""
        buffer = self._buffers[name]
        dtype = DTYPES[buffer.dtype]
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes > buffer.bytes:
            raise ValueError(f"{name}: {nbytes} bytes asked for, {buffer.bytes} planned")
        start = self._start + buffer.offset
        return self._block[start : start + nbytes].view(dtype).view(shape)


def allocate_pool(group: KvGroup, pages: int) -> Tensor:
    """The KV pool of a group: [layers, pages, 2, kv_heads, head_dim * page_tokens]."""
    shape = (len(group.layers), pages, 2, group.kv_heads, group.head_dim * group.page_tokens)
    return torch.empty(shape, dtype=DTYPES[group.dtype])
