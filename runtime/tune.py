"""Measuring tiles on the GPU: alternatives tried in whole decode steps, the best to a table.

In: a folder of `sitsc tune build`. Out: entries as `core/tiles.py` reads them, with evidence.
Compiles nothing. An alternative that is wrong or fails is left out and named.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sitsc import __version__
from sitsc.core.errors import DeviceError, SitscError
from sitsc.core.tiles import (
    AttentionEntry,
    TileEntry,
    TileTable,
    heads_of,
    read_table,
    shape_of,
    table_text,
)
from sitsc.core.tuning import (
    TuneCase,
    TuneChain,
    TuneSet,
    TuneSubject,
    contexts,
    read_tune_set,
    token_range,
)
from sitsc.runtime import cuda_driver
from sitsc.runtime.tune_chain import (
    Choice,
    StepChain,
    TuneMemory,
    distance,
    layers_of,
    require,
)

CARVEOUTS = (100, cuda_driver.DRIVER_CARVEOUT)
_MOST_ERROR = 5e-2  # of the logits after a few layers in bfloat16
_REPLAYS, _FINAL_REPLAYS, _FINALISTS = 5, 20, 5
_GRIDS_OF = 6  # families whose other grids are tried
_BETTER = 0.9993  # a new choice must be faster by more than the noise


@dataclass(frozen=True, slots=True)
class SubjectResult:
    """What was found for one subject at one token count.

    By context: `step_us` is the step with it, `own_us` what the step takes longer than without the
    subject, a place. `gain` is how much faster the step is than with the choice that there was,
    `library` how much slower it would be with the library's product, as factors.
    """

    subject: TuneSubject
    tokens: int
    best: TuneCase
    step_us: dict[int, float]
    own_us: dict[int, float]
    gain: float
    library: float | None
    measured: int
    unmeasured: int
    dropped: tuple[str, ...]
    carveout: int


def run(
    folder: Path,
    table: Path,
    seconds: float = 10.0,
    report: Callable[[SubjectResult], None] = lambda result: None,
    only: Sequence[int] = (),
) -> list[SubjectResult]:
    """Tune the steps in `folder` (of `only` these token counts), at most `seconds` for each.

    `table` is written after each; entries there of other layers are kept. Raises ArtifactError,
    TargetError for another GPU, DeviceError when a kernel breaks the device.
    """
    tune_set = read_tune_set(folder)
    device = cuda_driver.open_device(0)
    cuda_driver.require(device, tune_set.sm, 0)
    memory = TuneMemory(folder, tune_set, device)
    results: list[SubjectResult] = []
    for chain in tune_set.chains:
        if only and chain.tokens not in only:
            continue
        found = _Search(memory, chain).run(seconds)
        results += found
        table.write_text(table_text(merged(results, table_of(table), device.name)))
        for result in found:
            report(result)
    return results


def table_of(path: Path) -> TileTable:
    """The entries of a table file; none when there is no such file."""
    return read_table(path.read_text(), str(path)) if path.is_file() else TileTable()


def merged(results: Sequence[SubjectResult], before: TileTable, gpu: str) -> TileTable:
    """The best of each result as an entry, and those of `before` that none of them replaces."""
    linear: list[TileEntry] = []
    attention: list[AttentionEntry] = []
    for result in results:
        shape, kernel, tile = result.subject.shape, result.best.kernel, dict(result.best.tile)
        evidence, heads = _evidence(result, gpu), result.subject.kind == "attention"
        key = heads_of(shape) if heads else shape_of(shape)
        known = before.attention if heads else before.linear
        counts = {r.tokens for r in results if r.subject == result.subject}
        counts |= {e.evidence.get("tokens", e.high) for e in known if e.shape() == key}
        low, high = token_range(result.tokens, tuple(counts), kernel)
        if heads:
            low = max([1, *(count + 1 for count in counts if count < result.tokens)])
            tile["carveout"] = result.carveout
            attention.append(AttentionEntry(*heads_of(shape), low, result.tokens, tile, evidence))
        else:
            high = min(high, tile.get("block_t", high)) if kernel == "skinny" else high
            linear.append(TileEntry(*shape_of(shape), low, high, kernel, tile, evidence))
    return TileTable(
        (*_kept(before.linear, linear), *linear), (*_kept(before.attention, attention), *attention)
    )


def _kept(before: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """Entries whose token counts no new entry of the shape covers, cut where one begins."""
    kept = []
    for entry in before:
        same = [new for new in made if new.shape() == entry.shape()]
        free = [
            n
            for n in range(entry.low, entry.high + 1)
            if not any(new.low <= n <= new.high for new in same)
        ]
        if free:
            kept.append(replace(entry, low=free[0], high=free[-1]))
    return kept


def _evidence(result: SubjectResult, gpu: str) -> dict[str, Any]:
    contexts_us = {
        name: {str(length): round(us, 1) for length, us in times.items()}
        for name, times in (("us", result.own_us), ("step_us", result.step_us))
    }
    return contexts_us | {
        "gain": round(result.gain, 4),
        "library": None if result.library is None else round(result.library, 4),
        "tokens": result.tokens,
        "carveout": result.carveout,
        "gpu": gpu,
        "torch": torch.__version__,
        "version": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


class _Search:
    """One step: subjects tuned in turn, each with the best of the others around it."""

    def __init__(self, memory: TuneMemory, chain: TuneChain) -> None:
        self.made: TuneSet = memory.made
        self.step = StepChain(memory, chain, CARVEOUTS[chain.tokens <= 2])
        self.cases: dict[int, list[TuneCase]] = {}
        for case in chain.cases:
            self.cases.setdefault(case.subject, []).append(case)
        self.choice: Choice = {
            subject: next((c for c in cases if c.current), cases[0])
            for subject, cases in self.cases.items()
        }
        self.first = dict(self.choice)
        self.dropped: dict[int, list[str]] = {subject: [] for subject in self.cases}
        self.measured = dict.fromkeys(self.cases, 0)
        self.unmeasured = dict.fromkeys(self.cases, 0)
        self.want: Tensor | None = None

    def run(self, seconds: float) -> list[SubjectResult]:
        """Two passes over all cases, the second with the best of the first around them."""
        end = time.perf_counter() + seconds
        self.want = self.step.logits(self.choice)
        require(distance(self.want, self.want), 0.0)
        self._carve()
        order = sorted(self.cases, key=lambda s: self.made.subjects[s].kind)  # attention first
        for share in (0.55, 0.95):
            part = time.perf_counter() + (end - time.perf_counter()) * share
            for index, subject in enumerate(order):
                left = (part - time.perf_counter()) / (len(order) - index)
                self._improve(subject, self.cases[subject], left)
            self._carve()
        return [self._result(subject) for subject in order]

    def _carve(self) -> None:
        """The fastest of the carve-outs, at the shortest context."""
        graphs = []
        for carveout in CARVEOUTS:
            self.step.carveout = carveout
            graphs.append(self.step.graph(self.step.steps(self.choice)))
        self.step.set_context(contexts(self.step.chain.tokens)[0])
        times = self.step.steps_us(graphs, _FINAL_REPLAYS)
        self.step.carveout = min(zip(times, CARVEOUTS, strict=True))[1]

    def _improve(self, subject: int, cases: list[TuneCase], seconds: float) -> None:
        """Try the cases, families first, then the other grids of the best; keep the best."""
        end = time.perf_counter() + seconds
        base = self.step.graph(self.step.steps(self.choice))
        timed: list[tuple[float, TuneCase]] = []
        seen: set[int] = set()
        first = [c for c in cases if c.family not in seen and not seen.add(c.family)]
        waiting = list(first)
        done = 0
        while waiting and (time.perf_counter() < end or not timed):
            case = waiting.pop(0)
            done += 1
            factor = self._tried(subject, case, base)
            if factor is not None:
                timed.append((factor, case))
            if not waiting and done == len(first):
                timed.sort(key=lambda pair: pair[0])
                families = [one.family for _, one in timed[:_GRIDS_OF]]
                others = [c for c in cases if c.family in families and c not in first]
                waiting = sorted(others, key=lambda c: families.index(c.family))
        self.measured[subject] += len(timed)
        self.unmeasured[subject] = len(waiting)
        timed.sort(key=lambda pair: pair[0])
        best, chosen = _BETTER, self.choice
        for _, case in timed[:_FINALISTS]:
            choice = {**self.choice, subject: case}
            factor = self._factor(subject, self._graph(choice), base, _FINAL_REPLAYS)
            if factor < best:
                best, chosen = factor, choice
        self.choice = chosen

    def _graph(self, choice: Choice, without: int | None = None) -> torch.cuda.CUDAGraph:
        return self.step.graph(self.step.steps(choice, without))

    def _tried(self, subject: int, case: TuneCase, base: torch.cuda.CUDAGraph) -> float | None:
        """The step with a case against the base; None, and why, when it is wrong or fails."""
        choice = {**self.choice, subject: case}
        try:
            assert self.want is not None
            self.step.set_context(contexts(self.step.chain.tokens)[0])
            require(distance(self.step.logits(choice), self.want), _MOST_ERROR)
            return self._factor(subject, self._graph(choice), base, _REPLAYS)
        except (SitscError, RuntimeError) as error:
            tile = " ".join(f"{name}={value}" for name, value in case.tile.items())
            self.dropped[subject].append(f"{case.kernel} {tile}: {str(error).splitlines()[0]}")
            _still_alive(self.dropped[subject][-1])
            return None

    def _lengths(self, subject: int) -> tuple[int, ...]:
        """Attention is measured at several contexts, all else at the shortest."""
        lengths = contexts(self.step.chain.tokens)
        return lengths if self.made.subjects[subject].kind == "attention" else lengths[:1]

    def _factor(
        self, subject: int, graph: torch.cuda.CUDAGraph, base: torch.cuda.CUDAGraph, replays: int
    ) -> float:
        """How much slower a step is than another, the geometric mean over contexts."""
        product, lengths = 1.0, self._lengths(subject)
        for length in lengths:
            self.step.set_context(length)
            us, base_us = self.step.steps_us([graph, base], replays)
            product *= us / base_us
        return product ** (1 / len(lengths))

    def _result(self, subject: int) -> SubjectResult:
        whole, rest = self._graph(self.choice), self._graph(self.choice, subject)
        before = self._graph({**self.choice, subject: self.first[subject]})
        places = sum(
            len(layers) or 1
            for group, layers in zip(
                self.step.chain.groups, layers_of(self.step.chain), strict=True
            )
            for place in group.places
            if place in self.choice[subject].launches and place not in self.step.chain.fixed
        )
        step_us, own_us = {}, {}
        for length in self._lengths(subject):
            self.step.set_context(length)
            step_us[length], rest_us = self.step.steps_us([whole, rest], _FINAL_REPLAYS)
            own_us[length] = (step_us[length] - rest_us) / places
        library = next((c for c in self.cases[subject] if c.kernel == "library"), None)
        other = None
        if library is not None:
            graph = self._graph({**self.choice, subject: library})
            other = self._factor(subject, graph, whole, _FINAL_REPLAYS)
        return SubjectResult(
            subject=self.made.subjects[subject],
            tokens=self.step.chain.tokens,
            best=self.choice[subject],
            step_us=step_us,
            own_us=own_us,
            gain=self._factor(subject, before, whole, _FINAL_REPLAYS),
            library=other,
            measured=self.measured[subject],
            unmeasured=self.unmeasured[subject],
            dropped=tuple(self.dropped[subject]),
            carveout=self.step.carveout,
        )


def _still_alive(what: str) -> None:
    """Raises DeviceError when the device does nothing any more after a failed kernel."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"a kernel broke the device: {what} ({reason})") from None
