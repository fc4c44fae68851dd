"""Rows of random checkpoint tensors, for loading an artifact without its checkpoint.

In: the weight specs of a plan. Out: the same rows of a tensor whenever they are asked for, scaled
so that activations stay of order one, so that quantised weights and their scales agree.
"""

import math
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from sitsc.core.weights import WeightSpec

_BLOCK_ELEMENTS = 1 << 20


class RandomRows:
    """Random float32 rows by tensor name; a reader for `materialise`."""

    def __init__(self, specs: Iterable[WeightSpec], seed: int = 0) -> None:
        self._seed = seed
        self._inner: dict[str, tuple[int, ...]] = {}
        self._scale: dict[str, float] = {}
        for spec in specs:
            for source in spec.sources if spec.role == "weight" else ():
                self._inner[source.tensor] = spec.source_shape(source)[1:]
                self._scale[source.tensor] = 1 / math.sqrt(spec.shape[-1])

    def read(self, tensor: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop): drawn in blocks of rows, each from a seed of its own."""
        rows = max(1, _BLOCK_ELEMENTS // max(1, math.prod(self._inner[tensor])))
        first, last = start // rows, -(-stop // rows)
        blocks = torch.cat([self._block(tensor, rows, index) for index in range(first, last)])
        return blocks[start - first * rows : stop - first * rows]

    def _block(self, tensor: str, rows: int, index: int) -> Tensor:
        inner, name = self._inner[tensor], f"{self._seed}:{tensor}:{index}"
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn((rows, *inner), generator=generator)
        if inner:
            return values.mul_(self._scale[tensor])
        return values.mul_(0.1) if tensor.endswith(".bias") else values.mul_(0.1).add_(1.0)
