"""Where kernels find the other ranks: addresses in arenas on the CPU, by a plan of four ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sitsc.core.parallel import Partition
from sitsc.core.plan import ArenaBuffer, Plan
from sitsc.passes import CUDA_WIDE
from sitsc.runtime.shared_arena import part, write_places
from tests.cuda_families import CUDA_FAMILIES
from tests.cuda_rank_plans import plan_ranks

PARTITION = Partition(tp=2, pp=2)
BASES = [1 << 20, 5 << 20, 3 << 20, 9 << 20]


@pytest.fixture(scope="module")
def plan(traced: Any) -> Plan:
    graph = traced(CUDA_FAMILIES["qwen2"], "bfloat16").graph
    return plan_ranks(graph, CUDA_WIDE, PARTITION)[0]


class Written:
    """The arena of one rank after `write_places`."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.arena = torch.zeros(plan.of_rank(rank).memory.arena_bytes, dtype=torch.uint8)
        write_places(plan, rank, self.arena, BASES)
        self._buffers = buffers(plan, rank)

    def bytes_of(self, name: str) -> Tensor:
        return part(self.arena, self._buffers[name])

    def numbers(self, name: str) -> list[int]:
        return self.bytes_of(name).view(torch.int64).tolist()


def buffers(plan: Plan, rank: int) -> dict[str, ArenaBuffer]:
    return {b.name: b for b in plan.of_rank(rank).memory.arena}


@pytest.mark.parametrize("rank", range(4))
def test_the_ranks_of_a_stage_by_distance(rank: int, plan: Plan) -> None:
    found, stage = Written(plan, rank), rank // 2 * 2
    *distances, own, slot_bytes = found.numbers("peers")
    assert [BASES[rank] + distance for distance in distances] == BASES[stage : stage + 2]
    assert own == found.numbers("tp_rank")[0] == rank - stage
    slots = found.bytes_of("slots")
    assert (slots == 0xFF).all()
    assert slot_bytes % 16 == 0 and 2 * slot_bytes <= len(slots) < 2 * slot_bytes + 32


@pytest.mark.parametrize("rank", [0, 1])
def test_the_same_rank_of_the_next_stage(rank: int, plan: Plan) -> None:
    """A sender knows the mail and the flags, their reader where to acknowledge."""
    sender, reader = Written(plan, rank), Written(plan, rank + 2)
    there, here = buffers(plan, rank + 2), buffers(plan, rank)
    (name,) = plan.stages[0].sends
    mail, flags, slot_bytes = sender.numbers(f"{name}/to")
    assert mail == BASES[rank + 2] + there[f"{name}/mail"].offset
    assert flags == BASES[rank + 2] + there[f"{name}/flags"].offset
    acks, their_bytes = reader.numbers(f"{name}/from")
    assert acks == BASES[rank] + here[f"{name}/acks"].offset
    assert slot_bytes == their_bytes == there[f"{name}/mail"].bytes // 2


def test_one_rank_a_stage_has_no_peers(traced: Any) -> None:
    graph = traced(CUDA_FAMILIES["qwen2"], "bfloat16").graph
    plan = plan_ranks(graph, CUDA_WIDE, Partition(pp=2))[0]
    assert not {"peers", "slots", "tp_rank"} & buffers(plan, 0).keys()
    assert Written(replace(plan), 1).numbers("hidden_0/from")[0] > BASES[0]
