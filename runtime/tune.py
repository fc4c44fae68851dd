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
from sitsc.core.hardware import load_target
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
from sitsc.runtime.tune_chain import Choice, StepChain, TuneMemory, distance, require

CARVEOUTS = (100, cuda_driver.DRIVER_CARVEOUT)
_MOST_ERROR = 5e-2  # of the logits after a few layers in bfloat16
_REPLAYS, _FINAL_REPLAYS, _FINALISTS = 8, 24, 4
_GRIDS_OF = 6  # families whose other grids are tried
_BETTER = 0.9993  # a new choice must be faster by more than the noise


@dataclass(frozen=True, slots=True)
class SubjectResult:
    """What was found for one subject at one token count.

    `step_us` is the step with it, `own_us` what the step takes longer than without the subject, a
    place; `first_us` and `library_us` the steps with the choice that there was, with the library.
    """

    subject: TuneSubject
    tokens: int
    best: TuneCase
    step_us: float
    own_us: float
    first_us: float
    library_us: float | None
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
        shape = result.subject.shape
        same = [r.tokens for r in results if r.subject == result.subject]
        kernel = result.best.kernel
        low, high = token_range(result.tokens, tuple(same), kernel)
        evidence = _evidence(result, gpu)
        if result.subject.kind == "attention":
            low = max([1, *(count + 1 for count in same if count < result.tokens)])
            tile = dict(result.best.tile)
            attention.append(AttentionEntry(*heads_of(shape), low, result.tokens, tile, evidence))
        else:
            tile = dict(result.best.tile)
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
    return {
        "us": round(result.own_us, 2),
        "step_us": round(result.step_us, 1),
        "before_step_us": round(result.first_us, 1),
        "library_step_us": None if result.library_us is None else round(result.library_us, 1),
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
        self.dropped: dict[int, list[str]] = {subject: [] for subject in self.cases}
        self.measured = dict.fromkeys(self.cases, 0)
        self.unmeasured = dict.fromkeys(self.cases, 0)
        self.library: dict[int, float] = {}
        self.want: Tensor | None = None
        self.lengths = contexts(chain.tokens)

    def run(self, seconds: float) -> list[SubjectResult]:
        """Two passes, the second over the best of the first and with the carve-out set anew."""
        end = time.perf_counter() + seconds
        self.want = self.step.logits(self.choice)
        require(distance(self.want, self.want), 0.0)
        firsts = {}
        for subject in self.cases:
            self._look_at(subject)
            firsts[subject] = self._us(self.choice, _FINAL_REPLAYS)
        self._carve()
        best: dict[int, list[TuneCase]] = {}
        order = sorted(self.cases, key=lambda s: self.made.subjects[s].kind)  # attention first
        for index, subject in enumerate(order):
            share = (end - time.perf_counter()) * 0.8 / (len(order) - index)
            best[subject] = self._improve(subject, self.cases[subject], share)
        self._carve()
        for subject in order:
            if time.perf_counter() < end:
                self._improve(subject, best[subject], 1.0)
        self._carve()
        return [self._result(subject, firsts[subject]) for subject in order]

    def _carve(self) -> None:
        """The faster of the carve-outs, at the shortest context."""
        self.lengths, times = contexts(self.step.chain.tokens)[:1], []
        for carveout in CARVEOUTS:
            self.step.carveout = carveout
            times.append((self._us(self.choice, _FINAL_REPLAYS), carveout))
        self.step.carveout = min(times)[1]

    def _improve(self, subject: int, cases: list[TuneCase], seconds: float) -> list[TuneCase]:
        """Try the cases, keep the best as the choice; the few best."""
        end = time.perf_counter() + seconds
        self._look_at(subject)
        timed: list[tuple[float, TuneCase]] = []
        seen: set[int] = set()
        first = [c for c in cases if c.family not in seen and not seen.add(c.family)]
        waiting = list(first)
        done = 0
        while waiting and (time.perf_counter() < end or not timed):
            case = waiting.pop(0)
            done += 1
            us = self._tried(subject, case)
            if us is not None:
                timed.append((us, case))
            if not waiting and done == len(first):
                timed.sort(key=lambda pair: pair[0])
                families = [one.family for _, one in timed[:_GRIDS_OF]]
                others = [c for c in cases if c.family in families and c not in first]
                waiting = sorted(others, key=lambda c: families.index(c.family))
        self.measured[subject] += len(timed)
        self.unmeasured[subject] += len(waiting)
        timed.sort(key=lambda pair: pair[0])
        finalists = [case for _, case in timed[:_FINALISTS]]
        most = self._us(self.choice, _FINAL_REPLAYS)
        for case in finalists:
            us = self._us({**self.choice, subject: case}, _FINAL_REPLAYS)
            if us < most * _BETTER:
                most, self.choice = us, {**self.choice, subject: case}
        return finalists

    def _look_at(self, subject: int) -> None:
        """Attention is measured at several contexts, all else at the shortest."""
        lengths = contexts(self.step.chain.tokens)
        self.lengths = lengths if self.made.subjects[subject].kind == "attention" else lengths[:1]

    def _tried(self, subject: int, case: TuneCase) -> float | None:
        """Microseconds of the step with a case; None, and why, when it is wrong or fails."""
        choice = {**self.choice, subject: case}
        try:
            assert self.want is not None
            self.step.set_context(contexts(self.step.chain.tokens)[0])
            require(distance(self.step.logits(choice), self.want), _MOST_ERROR)
            us = self._us(choice, _REPLAYS)
            if case.kernel == "library":
                self.library[subject] = us
            return us
        except (SitscError, RuntimeError) as error:
            tile = " ".join(f"{name}={value}" for name, value in case.tile.items())
            self.dropped[subject].append(f"{case.kernel} {tile}: {str(error).splitlines()[0]}")
            _still_alive(self.dropped[subject][-1])
            return None

    def _us(self, choice: Choice, replays: int, without: int | None = None) -> float:
        """Microseconds of the step, over several contexts their geometric mean."""
        graph = self.step.graph(self.step.steps(choice, without))
        product = 1.0
        for length in self.lengths:
            self.step.set_context(length)
            product *= self.step.step_us(graph, replays)
        return product ** (1 / len(self.lengths))

    def _result(self, subject: int, first: float) -> SubjectResult:
        self._look_at(subject)
        whole = self._us(self.choice, _FINAL_REPLAYS)
        rest = self._us(self.choice, _FINAL_REPLAYS, subject)
        places = sum(
            len(group.layers[:8]) or 1
            for group in self.step.chain.groups
            for place in group.places
            if place in self.choice[subject].launches
        )
        return SubjectResult(
            subject=self.made.subjects[subject],
            tokens=self.step.chain.tokens,
            best=self.choice[subject],
            step_us=whole,
            own_us=(whole - rest) / places,
            first_us=first,
            library_us=self.library.get(subject),
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
