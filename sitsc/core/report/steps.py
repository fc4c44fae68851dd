"""The steps of a regime in the order of launching: lanes of stages, blocks of layers, kernels.

In: a plan and the name of a regime. Out: a `Lane` a stage, with predicted microseconds of one rank.
Where a package hides its kernels, or launches are not predicted one by one, the kernel classes of
the regime stand in their order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from sitsc.core.diff.kernels import launch_name, what_runs
from sitsc.core.diff.view import programs, spans
from sitsc.core.errors import OptionError
from sitsc.core.plan import PLAIN, KernelRow, Launch, LaunchGroup, Plan, Regime, greedy
from sitsc.core.report.kinds import PACKAGE, kind_of_launch, kind_of_operator

_ROUNDING = 1e-4  # times in plans have six digits


@dataclass(frozen=True, slots=True)
class Segment:
    """One launch, or of a package one kernel class in one layer; `count` calls of it together."""

    name: str
    what: str
    kind: str
    us: float
    bytes: int
    flops: int
    count: int = 1
    tile: str = ""


@dataclass(frozen=True, slots=True)
class Block:
    """Launches in order, repeated for each of `layers`; once where there are none."""

    name: str
    layers: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def times(self) -> int:
        """How often they are launched."""
        return max(1, len(self.layers))

    @property
    def each_us(self) -> float:
        """One layer of it."""
        return sum(segment.us for segment in self.segments)

    @property
    def us(self) -> float:
        """All layers."""
        return self.times * self.each_us


@dataclass(frozen=True, slots=True)
class Lane:
    """What the ranks of a stage launch; `step_us` is longer than all launches where the host is.

    `packaged` when kernel classes stand for launches.
    """

    stage: int
    ranks: tuple[int, ...]
    start_us: float
    step_us: float
    blocks: tuple[Block, ...]
    packaged: bool

    @property
    def us(self) -> float:
        """All launches."""
        return sum(block.us for block in self.blocks)

    @property
    def waits_us(self) -> float:
        """By how much the step is longer than its launches, 0 within rounding."""
        waits = self.step_us - self.us
        return waits if waits > _ROUNDING * self.step_us else 0.0


def regime_names(plan: Plan, wanted: Sequence[str] = ()) -> list[str]:
    """Names of regimes to show: `wanted`, or decode of one and of most sequences and the largest
    prompt. Raises OptionError for an unknown one, listing those there are.
    """
    known = {regime.name: regime for regime in programs(plan)[0].regimes}
    for name in wanted:
        if name not in known:
            hint = f"one of {', '.join(known)}"
            raise OptionError(f"no regime {name!r} in this plan", hint=hint)
    if wanted or plan.kind == PLAIN:
        return list(dict.fromkeys(wanted)) or list(known)
    found = []
    for kind, pick in (("decode", (0, -1)), ("prefill", (-1,))):
        those = sorted((r for r in known.values() if r.kind == kind), key=_tokens)
        found += [those[index].name for index in pick if those]
    return list(dict.fromkeys(found))


def _tokens(regime: Regime) -> int:
    return regime.sizes["tokens"]


def lanes(plan: Plan, name: str) -> tuple[Lane, ...]:
    """A lane a stage, each after the one before: what crosses between them is not in it.

    Steps are greedy ones, as predicted: what only draws is not in them.
    """
    found, start = [], 0.0
    for index, program in enumerate(programs(plan)):
        ranks = tuple(rank.rank for rank in plan.ranks if rank.program == index)
        regime = next(r for r in program.regimes if r.name == name)
        groups = greedy(regime.groups)
        launches = [launch for group in groups for launch in group.launches]
        packaged = any(launch.kind == PACKAGE for launch in launches)
        packaged |= not any(launch.predicted_us for launch in launches)
        made = _rows(plan, regime) if packaged else tuple(map(_block, groups))
        found.append(Lane(index, ranks, start, regime.predicted_us, made, packaged))
        start += regime.predicted_us
    return tuple(found)


def _block(group: LaunchGroup) -> Block:
    return Block(group.name, group.layers, tuple(map(_segment, group.launches)))


def _segment(launch: Launch) -> Segment:
    tile = ", ".join(f"{key} {value}" for key, value in sorted(launch.tile.items()))
    name, kind, us = launch_name(launch), kind_of_launch(launch), launch.predicted_us
    name = name or launch.kernel
    return Segment(name, what_runs(launch), kind, us, launch.bytes, launch.flops, 1, tile)


def _rows(plan: Plan, regime: Regime) -> tuple[Block, ...]:
    """Kernel classes of a regime; of a layer class what one of its layers takes."""
    layers = {item.name: item.layers for item in plan.model.layer_classes}
    blocks = []
    for name, rows in groupby(regime.kernels, key=lambda row: row.layer_class):
        of = layers.get(name, ())
        segments = tuple(_row_segment(row, max(1, len(of))) for row in rows)
        blocks.append(Block(name or "step", of, segments))
    return tuple(blocks)


def _row_segment(row: KernelRow, layers: int) -> Segment:
    what = f"{row.op} by {row.by}"
    each = row.bytes // layers, row.flops // layers, max(1, row.count // layers)
    return Segment(row.name, what, kind_of_operator(row.op), row.predicted_us / layers, *each)


def lane_title(plan: Plan, lane: Lane) -> str:
    """ "stage 0, layers 0-15, ranks 0-1"; "step" where one rank runs all."""
    if not plan.stages:
        return "whole step"
    layers = plan.stages[lane.stage].layers
    ranks = spans(lane.ranks).replace(" ", ", ")
    word = "ranks" if len(lane.ranks) > 1 else "rank"
    return f"stage {lane.stage}: layers {layers[0]}-{layers[1] - 1}, {word} {ranks}"
