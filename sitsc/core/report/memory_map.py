"""Where things lie: the parts of a device's memory, and the buffers of the arena with lifetimes.

In: a plan. Out: a `Device` a stage, and for a regime the `Arena` of each. All sizes are bytes.
"""

from dataclasses import dataclass

from sitsc.core.diff.view import Program, programs
from sitsc.core.plan import STEP_GROUPS, ArenaBuffer, Plan
from sitsc.core.report.steps import lanes

_PARTS = ("weights", "kv", "arena", "package", "graph", "slack")
FREE = "free"


@dataclass(frozen=True, slots=True)
class Part:
    """One class of data: where it lies and how it comes there, if the plan says."""

    name: str
    bytes: int
    place: str = ""
    method: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """Parts of the memory of a rank, in the plan's order; the last one what is left free, if known.

    `all_bytes` is the device's memory, or the sum of all parts where the target names none.
    """

    stage: int
    parts: tuple[Part, ...]
    total_bytes: int
    all_bytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Steps from `low` to `high` (not included) that launch the same group of layers."""

    name: str
    times: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Arena:
    """Buffers of a step: `kept` ones live always, `moving` ones from step `first` to step `last`.

    Offsets go up to `end`; there are `steps` of them, in the groups `spans`.
    """

    kept: tuple[ArenaBuffer, ...]
    moving: tuple[ArenaBuffer, ...]
    end: int
    steps: int
    spans: tuple[Span, ...]


def devices(plan: Plan) -> tuple[Device, ...]:
    """The memory of a rank of each stage."""
    places = {tier.data: tier for tier in plan.memory.tiers}
    found = []
    for index, program in enumerate(programs(plan)):
        memory, parts = program.memory, []
        for name in _PARTS:
            size, tier = getattr(memory, f"{name}_bytes"), places.get(name)
            where = (tier.place, tier.method) if tier else ()
            parts += [Part(name, size, *where)] if size else []
        left = plan.target.memory_bytes - memory.total_bytes
        parts += [Part(FREE, left)] if left > 0 else []
        found.append(Device(index, tuple(parts), memory.total_bytes, sum(p.bytes for p in parts)))
    return tuple(found)


def arena(plan: Plan, regime: str, stage: int = 0) -> Arena:
    """The buffers that exist in a step of a regime; those of other regimes share their places."""
    program = programs(plan)[stage]
    buffers = program.memory.arena
    prefix = f"{regime}/"
    names = {r.name for r in program.regimes}
    moving = tuple(b for b in buffers if b.name.startswith(prefix))
    kept = tuple(b for b in buffers if b.name.partition("/")[0] not in names)
    if not moving:  # of one regime alone: lifetimes without prefix
        moving = tuple(b for b in kept if b.last > 0)
        kept = tuple(b for b in kept if b.last == 0)
    steps = max((b.last + 1 for b in moving), default=1)
    end = max((b.offset + b.bytes for b in (*kept, *moving)), default=0)
    return Arena(kept, moving, end, steps, _spans(plan, program, regime, stage, steps))


def _spans(plan: Plan, program: Program, regime: str, stage: int, steps: int) -> tuple[Span, ...]:
    """Groups of layers by the steps in which they are launched; none where launches are hidden."""
    lane = lanes(plan, regime)[stage]
    if lane.packaged or not program.memory.arena:
        return ()
    found, at = [], 0
    for block in lane.blocks:
        if block.name in STEP_GROUPS:
            continue
        high = min(steps, at + len(block.segments))
        if block.layers and at < high:
            found.append(Span(block.name, block.times, at, high))
        at += len(block.segments)
    return tuple(found)
