"""The arenas of all ranks, mapped by all: kernels write to each other's.

In: the plan of all ranks, and which one this is. Out: this rank's arena, with the places in the
others' arenas written where its kernels look for them (codegen/templates/cuda_ranks.py.j2). The
memory is torch's symmetric memory; the ranks must be of one host.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed import _symmetric_memory as symmetric

from sitsc.core.errors import DeviceError
from sitsc.core.plan import ArenaBuffer, Plan

_NOT_THERE = 255  # of every byte of a slot that nothing has arrived in
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class SharedArena:
    """The arena of one rank [bytes], and what must live as long as others may write to it."""

    arena: Tensor
    handle: object


def share_arena(plan: Plan, rank: int, group: ProcessGroup) -> SharedArena:
    """Allocate the arena and meet the other ranks. Raises DeviceError."""
    nbytes = max(stage.memory.arena_bytes for stage in plan.stages)
    try:
        arena = symmetric.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda"))
        handle = symmetric.rendezvous(arena, group)
    except RuntimeError as error:
        raise DeviceError(
            f"the GPUs of the ranks cannot reach each other: {str(error).splitlines()[0]}",
            hint="all ranks must be on one host whose GPUs have peer access",
        ) from error
    start = arena.data_ptr() - int(handle.buffer_ptrs[rank])
    bases = [int(base) + start for base in handle.buffer_ptrs]
    arena.zero_()
    write_places(plan, rank, arena, bases)
    torch.cuda.synchronize()
    return SharedArena(arena, handle)


def write_places(plan: Plan, rank: int, arena: Tensor, bases: list[int]) -> None:
    """Tell the kernels of a rank where the others' arenas are, `bases` by rank."""
    place, tp = plan.ranks[rank], plan.parallel.tp
    own = _buffers(plan, place.program)

    def put(name: str, numbers: list[int]) -> None:
        part(arena, own[name]).view(torch.int64).copy_(torch.tensor(numbers))

    if "slots" in own:
        stage = [bases[rank - place.shard + other] for other in range(tp)]
        slots = part(arena, own["slots"])
        slots.fill_(_NOT_THERE)
        slot_bytes = len(slots) // (2 * (tp - 1)) // _ALIGNMENT * _ALIGNMENT
        put("peers", [*(base - bases[rank] for base in stage), place.shard, slot_bytes])
    if "tp_rank" in own:
        put("tp_rank", [place.shard])
    for name in plan.stages[place.program].receives:
        theirs = _buffers(plan, place.program - 1)
        acks = bases[rank - tp] + theirs[f"{name}/acks"].offset
        put(f"{name}/from", [acks, own[f"{name}/mail"].bytes // 2])
    for name in plan.stages[place.program].sends:
        theirs = _buffers(plan, place.program + 1)
        mail, flags = theirs[f"{name}/mail"], theirs[f"{name}/flags"]
        there = bases[rank + tp]
        put(f"{name}/to", [there + mail.offset, there + flags.offset, mail.bytes // 2])
    if "ids/to" in own:  # sampled ids go to the first stage
        put("ids/to", [bases[place.shard] + _buffers(plan, 0)["ids/mail"].offset, 0])


def part(arena: Tensor, buffer: ArenaBuffer) -> Tensor:
    """The bytes of a buffer."""
    return arena[buffer.offset : buffer.offset + buffer.bytes]


def _buffers(plan: Plan, stage: int) -> dict[str, ArenaBuffer]:
    return {buffer.name: buffer for buffer in plan.stages[stage].memory.arena}
