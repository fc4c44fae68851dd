"""Planned weights in one allocation of a device: read from files, or random for benchmarks.

In: a plan, and an artifact or a checkpoint folder. Out: tensors by name, views of the one block.
Reading runs beside whatever else loads: `WeightLoad.start` returns at once, `wait` gives errors.
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.plan import Plan
from sitsc.core.weights import DTYPES, WeightSpec, materialise
from sitsc.runtime.random_rows import RandomRows
from sitsc.runtime.weight_layout import Placed, WeightLayout, allocate_block, view
from sitsc.runtime.weight_reader import FileReader, Lanes, lane_of
from sitsc.runtime.weight_sources import WeightSource, checkpoint_source, packed_source

Progress = Callable[[float], None]


class WeightLoad:
    """Weights on their way from files into one block; `views` can be bound before they arrive."""

    def __init__(
        self,
        layout: WeightLayout,
        source: WeightSource,
        device: str = "cuda",
        *,
        progress: Progress = lambda share: None,
        lanes: Lanes | None = None,
    ) -> None:
        self._layout, self._source = layout, source
        self.block = allocate_block(layout, device)
        self.views = layout.views(self.block)
        self._reader = FileReader(source.files, source.pieces, lanes or Lanes())
        self._progress, self._lock, self._done = progress, threading.Lock(), 0
        self.seconds = 0.0
        self._job: Future[None] | None = None

    def start(self) -> "WeightLoad":
        """Begin reading in the background."""
        if self.block.is_cuda:
            torch.cuda.synchronize()  # the block is zero before anything is copied into it
        pool = ThreadPoolExecutor(1)
        self._job = pool.submit(self._run)
        pool.shutdown(wait=False)
        return self

    def wait(self) -> dict[str, Tensor]:
        """All weights, loaded. Raises ArtifactError, CheckpointError or OSError."""
        assert self._job is not None
        try:
            self._job.result()
        except BaseException:
            self.stop()
            raise
        return self.views

    def stop(self) -> None:
        """End reading early; returns when no thread writes to the block any more."""
        self._reader.stop()
        if self._job is not None:
            self._job.exception()

    def _run(self) -> None:
        begun = time.perf_counter()
        lane = lane_of(0, self.block.device)
        for place in self._source.made:
            lane.copy(view(self.block, place), materialise(place.spec, self._source.rows))
            self._advance(place.spec.nbytes)
        self._reader.run(self.block, self._advance)
        self.seconds = time.perf_counter() - begun

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            share = self._done / max(1, self._layout.nbytes)
            self._progress(min(1.0, share))


def weight_load(
    artifact: Artifact,
    folder: Path | None,
    device: str = "cuda",
    *,
    progress: Progress = lambda share: None,
    lanes: Lanes | None = None,
) -> WeightLoad:
    """The load of an artifact's weights: from its own file, or from a checkpoint folder.

    Raises ArtifactError or CheckpointError where files and plan disagree; reads headers only.
    """
    layout = WeightLayout.of(artifact.plan.model.parameters)
    if folder is None:
        source = packed_source(artifact, layout)
    else:
        source = checkpoint_source(folder, layout)
    return WeightLoad(layout, source, device, progress=progress, lanes=lanes)


# --- random weights -----------------------------------------------------------------------------


def random_weights(plan: Plan, seed: int = 0, device: str = "cuda") -> dict[str, Tensor]:
    """Random weights in one allocation, scaled so that activations stay of order one.

    On a GPU they are drawn there; on the CPU the same rows make quantised and packed forms.
    """
    layout = WeightLayout.of(plan.model.parameters)
    block = allocate_block(layout, device)
    rows = RandomRows(plan.model.parameters, seed)
    generator = torch.Generator(device).manual_seed(seed)
    for place in layout.places:
        if block.is_cuda and _drawn(place.spec):
            _draw(view(block, place), place, generator)
        else:
            view(block, place).copy_(materialise(place.spec, rows.read))
    return layout.views(block)


def _drawn(spec: WeightSpec) -> bool:
    """Whether a weight can be drawn where it lies."""
    return spec.role == "weight" and spec.format == "plain" and DTYPES[spec.dtype].is_floating_point


def _draw(weight: Tensor, place: Placed, generator: torch.Generator) -> None:
    shape = place.spec.shape
    if len(shape) > 1:
        weight.normal_(0.0, 1 / math.sqrt(shape[-1]), generator=generator)
    elif place.spec.name.endswith(".bias"):
        weight.normal_(0.0, 0.1, generator=generator)
    else:
        weight.normal_(1.0, 0.1, generator=generator)
