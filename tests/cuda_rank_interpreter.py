"""CUDA plans of several ranks executed on the CPU: the ranks of a stage launch by launch together.

In: a plan of all ranks, kernel sources, the shapes of the kernels between ranks and each rank's
weights; then steps. Out: the logits of each step, the same bits on every rank of the last stage.
Where other ranks may already write while one still computes is filled with not-a-number first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sitsc.codegen.triton_source import KernelSource
from sitsc.core.plan import Launch, Plan
from sitsc.runtime.shared_arena import write_places
from tests import cuda_rank_collectives as collectives
from tests.cuda_plan_interpreter import Machine, PlanStep

AMONG_RANKS = ("all_reduce", "all_gather", "share_ids")
CROSSING = ("send", "receive")
Shapes = dict[str, dict[str, Any]]
Placed = tuple[Launch, int | None]


def run_ranks(
    plan: Plan,
    sources: dict[str, KernelSource],
    shapes: Shapes,
    weights: list[dict[str, Tensor]],
    steps: list[PlanStep],
) -> list[Tensor]:
    """Logits [rows, width] of each step, in order; only in an interpreting process."""
    machines = [Machine(plan.of_rank(rank), sources, held) for rank, held in enumerate(weights)]
    bases = [machine.arena.data_ptr() for machine in machines]
    for rank, machine in enumerate(machines):
        write_places(plan, rank, machine.arena, bases)
    tp, places = plan.parallel.tp, collectives.Places([machine.arena for machine in machines])
    stages = [_Stage(machines[at : at + tp], shapes, places) for at in range(0, plan.num_ranks, tp)]
    found = []
    for step in steps:
        for stage in stages:
            stage.run(step)
        found.append(stages[-1].logits(step))
        if len(stages) > 1:
            sampled = [1000 * len(found) + row for row in range(len(step.context_lens))]
            stages[-1].send_ids(step, sampled)
            stages[0].place_sent(step, sampled, 0)
            if len(found) > 1:  # those of the step before are still there
                stages[0].place_sent(step, [1000 * (len(found) - 1)], 1)
    return found


class _Stage:
    """The ranks of one stage."""

    def __init__(
        self, machines: Sequence[Machine], shapes: Shapes, places: collectives.Places
    ) -> None:
        self._machines, self._shapes, self._places = machines, shapes, places

    def run(self, step: PlanStep) -> None:
        """Every launch on all ranks."""
        sizes = [machine.begin(step) for machine in self._machines]
        placed = self._machines[0].launches(step.regime)
        together = [launch for launch in placed if launch[0].template in AMONG_RANKS]
        turn = 0
        for launch, layer in placed:
            if launch.template in AMONG_RANKS:
                turn += 1
                following = together[turn] if turn < len(together) else None
                self._collective((launch, layer), following, sizes[0])
            elif launch.template in CROSSING:
                for machine in self._machines:
                    values = machine.values(launch, layer, sizes[0])
                    shape = self._shapes[launch.kernel]
                    getattr(collectives, launch.template)(shape, values, self._places)
            else:
                for machine in self._machines:
                    machine.launch(launch, layer, sizes[0])
        assert not together or together[0][0].template == "all_reduce", "who writes too early?"
        self._share_ids(step.regime, sizes[0])
        for machine in self._machines if together else ():
            assert (machine.part("slots") == 0xFF).all()

    def logits(self, step: PlanStep) -> Tensor:
        """What all ranks have."""
        first, *others = (machine.logits(step) for machine in self._machines)
        assert all(torch.equal(first, other) for other in others)
        return first

    def _collective(self, now: Placed, following: Placed | None, sizes: dict[str, int]) -> None:
        """A collective. Those who leave it first may write for the one that follows."""
        launch, layer = now
        shape = self._shapes[launch.kernel]
        early = [] if following is None else self._gathered(following, sizes)
        for place in early:
            place.fill_(0xFF)
        if launch.template == "all_gather":
            places = self._gathered(now, sizes)
            assert all((place == 0xFF).all() for place in places), "written before it is gathered"
        ranks = [
            machine.values(launch, layer, sizes) | {"num_ranks": len(self._machines)}
            for machine in self._machines
        ]
        getattr(collectives, launch.template)(shape, ranks)

    def _gathered(self, placed: Placed, sizes: dict[str, int]) -> list[Tensor]:
        """On each rank what a gather writes."""
        launch, layer = placed
        if launch.template != "all_gather":
            return []
        size = self._shapes[launch.kernel]["inner_bytes"] * len(self._machines)
        found = []
        for machine in self._machines:
            values = machine.values(launch, layer, sizes)
            found.append(values["y_ptr"].view(torch.uint8)[: values["num_rows"] * size])
        return found

    def _share_ids(self, regime: str, sizes: dict[str, int]) -> None:
        """What rank 0 has sampled is on all ranks, where the next step looks for it."""
        groups = {group.name: group for group in self._machines[0].regimes[regime].groups}
        for launch in groups["next"].launches if "next" in groups else ():
            if launch.template == "share_ids":
                for rank, machine in enumerate(self._machines):
                    machine.part("sampled_ids").view(torch.int64)[:] = -7 - rank
                self._collective((launch, None), None, sizes)
                for machine in self._machines:
                    ids = machine.part("sampled_ids").view(torch.int64)
                    assert (ids[: sizes["sequences"]] == -7).all()

    def send_ids(self, step: PlanStep, sampled: list[int]) -> None:
        """On the ranks that sample: these are the ids of the step."""
        for machine in self._machines:
            launch = _named(machine, step.regime, "send_ids")
            machine.part("sampled_ids").view(torch.int64)[: len(sampled)] = torch.tensor(sampled)
            values = machine.values(launch, None, {"sequences": len(sampled)})
            collectives.send_ids(self._shapes[launch.kernel], values, self._places)

    def place_sent(self, step: PlanStep, sampled: list[int], since: int) -> None:
        """On the ranks that embed: the ids of a step come to where they belong, last one first."""
        count = len(sampled)
        for machine in self._machines:
            launch = _named(machine, step.regime, "place_sent")
            shape = self._shapes[launch.kernel]
            rows = torch.arange(count) + since * shape["rows"]
            machine.part("token_sources").view(torch.int32)[:count] = rows.int()
            places = torch.arange(count).flip(0)
            machine.part("token_places").view(torch.int32)[:count] = places.int()
            values = machine.values(launch, None, {"sequences": count})
            collectives.place_sent(shape, values)
            ids = machine.part("token_ids").view(torch.int64)[:count]
            assert ids.flip(0).tolist() == sampled


def _named(machine: Machine, regime: str, template: str) -> Launch:
    """The launch of a template around the model."""
    groups = machine.regimes[regime].groups
    (found,) = (one for group in groups for one in group.launches if one.template == template)
    return found
