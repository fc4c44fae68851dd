"""Measuring tiles on the GPU: every candidate of a folder checked, timed, the best to a table.

In: a folder of `sitsc tune build`. Out: entries as `core/tiles.py` reads them, with evidence.
Compiles nothing. A candidate that is wrong or fails is left out and named.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sitsc import __version__
from sitsc.core.errors import DeviceError, SitscError
from sitsc.core.hardware import TargetData, load_target
from sitsc.core.kernel_meta import kernel_folder, read_kernel_meta
from sitsc.core.tiles import TileEntry, read_entries, shape_of, table_text
from sitsc.core.tuning import TuneCase, TuneSet, read_tune_set, token_range
from sitsc.runtime import cuda_driver
from sitsc.runtime.launcher import KernelImage
from sitsc.runtime.tune_chain import (
    MOST_ERROR,
    LinearChain,
    TimedGraph,
    copies,
    random_pool,
    weight_bytes,
)

CARVEOUT = 100  # percent of on-chip memory as shared memory, as the executor loads kernels
# A norm or an activation that the library's product needs beside it; also what the kernel after it
# loses, which cannot start before the library's ends (1.7 µs a kernel on an H200).
_PART_US = 2.0
_FINALISTS, _REPLAYS, _FINAL_REPLAYS = 4, 5, 15


@dataclass(frozen=True, slots=True)
class LayerResult:
    """What was measured for one shape and token count; microseconds a launch, None: nothing.

    `dropped` says which candidates were wrong or failed, `unmeasured` how many the time was too
    short for.
    """

    shape: dict[str, Any]
    tokens: int
    best: TuneCase | None
    best_us: float | None
    current_us: float | None
    library_us: float | None
    limit_us: float
    measured: int
    unmeasured: int
    dropped: tuple[str, ...]

    def library_wins(self) -> bool:
        """Whether the library is faster with the kernels it needs beside it and no overlap."""
        if self.library_us is None or self.shape["bias"]:
            return False
        parts = 1 + self.shape["norm"] + (self.shape["epilogue"] == "glu")
        whole = self.library_us + _PART_US * parts
        return self.best_us is None or whole < self.best_us


def run(
    folder: Path,
    table: Path,
    seconds: float = 10.0,
    carveout: int = CARVEOUT,
    report: Callable[[LayerResult], None] = lambda result: None,
) -> list[LayerResult]:
    """Measure everything in `folder`, at most `seconds` for each shape and token count.

    `table` is written after each; entries there of other shapes are kept. Raises ArtifactError,
    TargetError for another GPU, DeviceError when a kernel breaks the device.
    """
    tune_set = read_tune_set(folder)
    device, data = cuda_driver.open_device(0), load_target(tune_set.target)
    cuda_driver.require(device, tune_set.sm, 0)
    bench = _Bench(folder, tune_set, device, data, carveout)
    results: list[LayerResult] = []
    for cases in bench.groups():
        results.append(bench.measure(cases, seconds))
        table.write_text(table_text(entries(results, table_entries(table), device.name)))
        report(results[-1])
    return results


def table_entries(table: Path) -> tuple[TileEntry, ...]:
    """The entries of a table file; none when there is no such file."""
    return read_entries(table.read_text(), str(table)) if table.is_file() else ()


def entries(results: list[LayerResult], before: tuple[TileEntry, ...], gpu: str) -> list[TileEntry]:
    """The best of each result as a table entry, after those of `before` for other shapes."""
    measured = {shape_of(result.shape) for result in results}
    kept = [entry for entry in before if entry.shape() not in measured]
    return kept + [made for result in results if (made := _entry(result, results, gpu))]


def _entry(result: LayerResult, results: list[LayerResult], gpu: str) -> TileEntry | None:
    if result.library_wins():
        kernel, tile, us = "library", {}, result.library_us
    elif result.best is not None:
        kernel, tile, us = result.best.kernel, result.best.tile, result.best_us
    else:
        return None
    counts = tuple(r.tokens for r in results if r.shape == result.shape)
    low, high = token_range(result.tokens, counts, kernel)
    evidence = {
        "us": _rounded(us),
        "limit_us": _rounded(result.limit_us),
        "current_us": _rounded(result.current_us),
        "library_us": _rounded(result.library_us),
        "tokens": result.tokens,
        "gpu": gpu,
        "torch": torch.__version__,
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    return TileEntry(*shape_of(result.shape), low, high, kernel, dict(tile), evidence)


def _rounded(us: float | None) -> float | None:
    return None if us is None else round(us, 3)


class _Bench:
    """The GPU with the random weights, and what measures one shape and token count."""

    def __init__(
        self,
        folder: Path,
        tune_set: TuneSet,
        device: cuda_driver.Device,
        data: TargetData,
        carveout: int,
    ) -> None:
        assert data.cuda is not None
        self._folder = folder / kernel_folder(tune_set.sm)
        self._groups, self._device, self._carveout = tune_set.groups(), device, carveout
        self._read_bytes_per_s = data.target.ceilings["read_bytes_per_s"].value
        free, _ = torch.cuda.mem_get_info()
        shapes = [cases[0].shape for cases in self._groups]
        self._copies = [copies(shape, data.cuda.l2_bytes, free) for shape in shapes]
        need = [n * weight_bytes(s) for n, s in zip(self._copies, shapes, strict=True)]
        torch.manual_seed(0)
        self._pool = random_pool(max(need))
        self._images: dict[str, KernelImage] = {}

    def groups(self) -> list[tuple[TuneCase, ...]]:
        """The cases by shape and token count."""
        return self._groups

    def measure(self, cases: tuple[TuneCase, ...], seconds: float) -> LayerResult:
        """Check and time the cases in their order until the time is over; then the best again."""
        end = time.perf_counter() + seconds
        chain = LinearChain(cases, self._pool, self._copies[self._groups.index(cases)])
        limit_us = weight_bytes(chain.shape) / self._read_bytes_per_s * 1e6
        timed: list[tuple[float, TuneCase, TimedGraph]] = []
        dropped: list[str] = []
        done = 0
        for case in cases:
            if time.perf_counter() > end and done:
                break
            done += 1
            try:
                graph = self._checked(chain, case, limit_us)
                timed.append((graph.launch_us(_REPLAYS), case, graph))
                timed = _fastest(timed)
                _require(chain.error_after_chain(), "in a chain")
            except (SitscError, RuntimeError) as error:
                timed = [one for one in timed if one[1] is not case]
                dropped.append(f"{case.name()}: {str(error).splitlines()[0]}")
                _still_alive(dropped[-1])
        again = [(graph.launch_us(_FINAL_REPLAYS), case) for _, case, graph in timed]
        best_us, best = min(again, key=lambda pair: pair[0], default=(None, None))
        return LayerResult(
            shape=chain.shape,
            tokens=chain.tokens,
            best=best,
            best_us=best_us,
            current_us=next((us for us, case in again if case.current), None),
            library_us=chain.graph(chain.library(), limit_us).launch_us(_FINAL_REPLAYS),
            limit_us=limit_us,
            measured=done - len(dropped),
            unmeasured=len(cases) - done,
            dropped=tuple(dropped),
        )

    def _checked(self, chain: LinearChain, case: TuneCase, limit_us: float) -> TimedGraph:
        """The captured chain of a candidate that gives the reference's answer."""
        steps = chain.bind(case, self._image(case.key))
        _require(chain.error(steps), "alone")
        return chain.graph(steps, limit_us)

    def _image(self, key: str) -> KernelImage:
        """The kernel, loaded once."""
        if key not in self._images:
            path = self._folder / f"{key}.cubin"
            meta = read_kernel_meta(path.with_suffix(".json").read_text(), path.name)
            image = KernelImage.load(path.read_bytes(), meta, self._device, self._carveout)
            self._images[key] = image
        return self._images[key]


def _fastest(
    timed: list[tuple[float, TuneCase, TimedGraph]],
) -> list[tuple[float, TuneCase, TimedGraph]]:
    """The few fastest, and today's choice."""
    ordered = sorted(timed, key=lambda one: one[0])
    return ordered[:_FINALISTS] + [one for one in ordered[_FINALISTS:] if one[1].current]


def _require(error: float, when: str) -> None:
    """Raises DeviceError for a result that is too far from the reference, or not a number."""
    if not error <= MOST_ERROR:
        raise DeviceError(f"wrong {when}: relative error {error:.1e}, limit {MOST_ERROR:.0e}")


def _still_alive(what: str) -> None:
    """Raises DeviceError when the device does nothing any more after a failed kernel."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"a kernel broke the device: {what} ({reason})") from None
