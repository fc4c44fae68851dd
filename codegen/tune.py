"""Candidates for the tile table of a GPU: scheduled in a decode step, compiled, written.

In: a function that schedules a step, token counts, a target. Out: a folder with cubins and
tune.json. Kernels that spill or do not fit are left out. Each is made from a table entry, by the
same code that will read the measured table.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.cuda_attention import MERGES, Heads
from sitsc.codegen.cuda_candidates import candidates, split_counts
from sitsc.codegen.tune_linear import Choice, flipped, linear_choices
from sitsc.core.errors import CompileError
from sitsc.core.hardware import CudaLimits
from sitsc.core.kernel_meta import kernel_folder
from sitsc.core.kernels import KernelProvider
from sitsc.core.plan import Launch
from sitsc.core.tiles import (
    AttentionEntry,
    TileEntry,
    TileTable,
    choose_attention,
    heads_of,
    shape_of,
)
from sitsc.core.tuning import TuneCase, TuneChain, TuneGroup, TuneSet, TuneSubject, write_tune_set


class Scheduled(Protocol):
    """A scheduled step; see passes/cuda_chain.py."""

    launches: dict[str, tuple[Launch, ...]]
    groups: list[tuple[tuple[int, ...], tuple[str, ...]]]
    asked: dict[str, tuple[str, dict[str, Any]]]
    buffers: dict[str, int]


Schedule = Callable[[int, KernelProvider], Scheduled]


class VariedProvider(CudaProvider):
    """A provider whose table has one more entry."""

    def __init__(self, target: str, limits: CudaLimits, table: TileTable | None) -> None:
        super().__init__(target, limits)
        self.usual = self.table if table is None else table

    def vary(self, subject: TuneSubject, tokens: int, choice: Choice) -> None:
        """From now on `choice` for that subject; all else as usual."""
        usual = self.usual
        if subject.kind == "attention":
            shape = heads_of(subject.shape)
            attention = AttentionEntry(*shape, tokens, tokens, choice.tile, {})
            self.table = replace(usual, attention=(attention, *usual.attention))
        else:
            given = (*shape_of(subject.shape), tokens, tokens)
            linear = TileEntry(*given, choice.kernel, choice.tile, {})
            self.table = replace(usual, linear=(linear, *usual.linear))


def build(
    schedule: Schedule,
    tokens: Sequence[int],
    most: int,
    target: str,
    limits: CudaLimits,
    folder: Path,
    empty: TuneSet,
    progress: Callable[[float], None] = lambda share: None,
    table: TileTable | None = None,
) -> tuple[TuneSet, list[CompileError]]:
    """Compile about `most` kernels for each layer and token count into `folder`.

    `empty` is completed with chains. Choices of `table`, by default the target's own, are where the
    search begins; where they leave sums in parts, all others do. Also returns why kernels were left
    out. Raises CacheError, OSError of the folder.
    """
    provider = VariedProvider(target, limits, table)
    subjects: list[TuneSubject] = []
    chains = [_chain(schedule, provider, count, most, subjects) for count in tokens]
    refused: list[CompileError] = []
    keys = {key for chain in chains for key in _keys(chain)}
    sources = [provider.sources[key] for key in sorted(keys)]
    metas = compile_kernels(sources, limits.sm, folder, progress, refused=refused)
    for source in (folder / kernel_folder(limits.sm)).glob("*.py"):
        source.unlink()  # the launcher needs none, and the folder travels
    made = {meta.key for meta in metas}
    kept = [
        replace(chain, cases=tuple(c for c in chain.cases if _kernels(c.launches) <= made))
        for chain in chains
    ]
    found = replace(empty, subjects=tuple(subjects), chains=tuple(kept))
    write_tune_set(found, folder)
    return found, refused


def _chain(
    schedule: Schedule,
    provider: VariedProvider,
    tokens: int,
    most: int,
    subjects: list[TuneSubject],
) -> TuneChain:
    """The step of so many tokens; subjects that are new are added."""
    provider.table = provider.usual
    base = schedule(tokens, provider)
    buffers = dict(base.buffers)
    cases: list[TuneCase] = []
    arguments = [a for many in base.launches.values() for one in many for a in one.arguments]
    parts = any(argument.name == "parts_ptr" for argument in arguments)
    for subject in _unique(base):
        if subject not in subjects:
            subjects.append(subject)
        places = [p for p, asked in base.asked.items() if TuneSubject(*asked) == subject]
        given = (tokens, provider.usual, provider.limits, most)
        for choice in choices(subject, *given, parts=parts):
            provider.vary(subject, tokens, choice)
            varied = schedule(tokens, provider)
            if varied.launches.keys() != base.launches.keys():
                continue  # other layers would have to leave or add parts
            if not choice.current and not _taken(choice, varied, places):
                continue  # the layer cannot have this kernel: it got another
            for name, nbytes in varied.buffers.items():
                buffers[name] = max(nbytes, buffers.get(name, 0))
            launches = {place: varied.launches[place] for place in places}
            launches |= {
                place: one
                for place, one in varied.launches.items()
                if place not in base.asked and one != base.launches.get(place)
            }
            number = subjects.index(subject)
            told = (choice.family, choice.kernel, choice.tile, choice.current)
            cases.append(TuneCase(number, *told, launches))
    groups = tuple(TuneGroup(layers, places) for layers, places in base.groups)
    fixed = {place: one for place, one in base.launches.items() if place not in base.asked}
    return TuneChain(tokens, groups, fixed, buffers, tuple(cases))


def _taken(choice: Choice, varied: Scheduled, places: list[str]) -> bool:
    """Whether a choice is what is launched; where sums cannot stay in parts, another kernel is."""
    if choice.kernel == "library":
        return True
    made = (one.template for place in places for one in varied.launches[place])
    return any(template.startswith(choice.kernel) for template in made)


def _unique(base: Scheduled) -> list[TuneSubject]:
    """What can be tuned in a step, in the order of its first place."""
    found: list[TuneSubject] = []
    for asked in base.asked.values():
        if TuneSubject(*asked) not in found:
            found.append(TuneSubject(*asked))
    return found


def _keys(chain: TuneChain) -> set[str]:
    found = _kernels(chain.fixed)
    return found.union(*(_kernels(case.launches) for case in chain.cases))


def _kernels(launches: dict[str, tuple[Launch, ...]]) -> set[str]:
    return {one.kernel for many in launches.values() for one in many if one.kind == "kernel"}


# --- what is tried --------------------------------------------------------------------------------


def choices(
    subject: TuneSubject,
    tokens: int,
    table: TileTable,
    gpu: CudaLimits,
    most: int,
    *,
    parts: bool = False,
) -> list[Choice]:
    """Today's choice, the same with the other trigger, then candidates, likeliest first.

    With `parts`, layers of the step leave sums in parts, so norms keep kernels of their own.
    """
    attention = subject.kind == "attention"
    found = list(
        _attention_choices(subject.shape, tokens, table, gpu, most)
        if attention
        else linear_choices(subject.shape, tokens, table, gpu, most, parts)
    )
    seen: list[tuple[str, dict[str, int]]] = []
    kept = []
    for choice in found:
        if (choice.kernel, choice.tile) not in seen:
            seen.append((choice.kernel, choice.tile))
            kept.append(choice)
    return kept


def _attention_choices(
    shape: dict[str, Any], sequences: int, table: TileTable, gpu: CudaLimits, most: int
) -> Iterator[Choice]:
    now = choose_attention(table.attention, shape, sequences, gpu.num_sms)
    yield Choice(now.kernel, now.tile, 0, True)
    yield Choice(now.kernel, flipped(now.tile), 1)
    op = heads(shape)
    tried = 0
    for one in candidates(op, sequences, gpu):
        if tried >= most:
            return
        merge, tile = MERGES.index(one.tile["merge"]), dict(one.tile)
        counts = [n for n in split_counts(op, sequences, gpu) if (n > 1) == (merge > 0)]
        for count in counts:
            yield Choice(one.template, tile | {"merge": merge, "splits": count}, tried + 2)
        tried += bool(counts)


def heads(shape: dict[str, Any]) -> Heads:
    """The heads of an attention shape, as the provider builds them."""
    return CudaProvider.heads(shape)
