"""Single steps of a CUDA executor on given sequences, for checks: nothing is scheduled.

In: an executor and texts on pages. Out: logits and sampled ids on the CPU, read after the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sitsc.core.plan import Plan, Regime
from sitsc.core.serving.batch import StepBatch
from sitsc.runtime.selftest_reference import Texts

IDLE = -1


class StepMemory(Protocol):
    """What checks look at of the allocations of an executor."""

    weights: dict[str, Tensor]
    arena: Tensor
    pools: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one decode step left: logits [rows, width] float32, sampled ids [rows]."""

    logits: Tensor
    sampled: Tensor

    def same(self, other: "Decoded") -> bool:
        """Equal bits."""
        bits = [x.logits.contiguous().view(torch.int32) for x in (self, other)]
        return torch.equal(*bits) and torch.equal(self.sampled, other.sampled)

    def rows(self, start: int, stop: int) -> "Decoded":
        """Some of the rows."""
        return Decoded(self.logits[start:stop], self.sampled[start:stop])


class StepRunner:
    """Runs steps of an executor (`CudaExecutor`) by hand. The engine must be idle meanwhile."""

    def __init__(self, executor: Any, plan: Plan) -> None:
        self.executor, self.plan = executor, plan
        self.regimes = {regime.name: regime for regime in plan.regimes}
        width = next(b.shape[1] for b in plan.memory.arena if b.name == "block_table")
        self._width = width

    def prefill(
        self, parts: Sequence[tuple[Sequence[int], int, Sequence[int]]]
    ) -> tuple[str, Tensor]:
        """Tokens, those in the pages before, and pages of each sequence; regime and logits."""
        starts = [0]
        for ids, _, _ in parts:
            starts.append(starts[-1] + len(ids))
        batch = StepBatch(
            "prefill",
            tuple(range(len(parts))),
            [token for ids, _, _ in parts for token in ids],
            starts,
            [before for _, before, _ in parts],
            [list(table) for _, _, table in parts],
            [True] * len(parts),
        )
        regime, rows = self.executor.prefill(batch)
        self.executor.stream.synchronize()
        return regime.name, self.executor.logits(regime, rows).cpu()

    def fill(self, texts: Texts, indices: Sequence[int]) -> None:
        """Compute the prompts of some sequences, in steps as large as the plan has."""
        for part in prefill_parts(self.plan, [texts.prompts[i] for i in indices]):
            some = [indices[i] for i in part]
            self.prefill([(texts.ids[i][:-1], 0, texts.tables[i]) for i in some])

    def decode(
        self,
        regime: Regime,
        texts: Texts,
        rows: Sequence[int],
        *,
        graph: bool = True,
        draws: bool = False,
    ) -> Decoded:
        """One step of the sequences `rows` after their prompts; other rows of the bucket idle.

        `draws`: by the graph of steps in which rows draw.
        """
        ids = [texts.ids[i][-1] for i in rows]
        self.set(regime, ids, [texts.prompts[i] for i in rows], [texts.tables[i] for i in rows])
        return self.again(regime, len(rows), graph=graph, draws=draws)

    def set(
        self,
        regime: Regime,
        ids: Sequence[int],
        lengths: Sequence[int],
        tables: Sequence[Sequence[int]],
    ) -> None:
        """Poison the results of the last step and write the inputs of the next."""
        bucket = regime.sizes["sequences"]
        idle = bucket - len(ids)
        with torch.cuda.stream(self.executor.stream):
            self.executor.logits(regime, bucket).fill_(float("nan"))
            self.executor.sampled(bucket).fill_(IDLE)
        name = self.executor.set_decode(
            [*ids, *[0] * idle],
            [*lengths, *[IDLE] * idle],
            [*[list(table) for table in tables], *[[0]] * idle],
        )
        assert name == regime.name, f"{name} was taken for {regime.name}"

    def again(
        self, regime: Regime, rows: int, *, graph: bool = True, draws: bool = False
    ) -> Decoded:
        """One more step with the inputs as they are on the device."""
        executor = self.executor
        if graph:
            executor.replay(regime.name, draws=draws)
        else:
            sizes = regime.sizes | {"sequence_pages": self._width}
            with torch.cuda.stream(executor.stream):
                for step in executor.steps(regime, sizes):
                    step(executor.stream.cuda_stream)
        executor.stream.synchronize()
        return Decoded(executor.logits(regime, rows).cpu(), executor.sampled(rows).cpu())


def prefill_parts(plan: Plan, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts by index, in order, split into steps that the largest prefill regime holds."""
    sizes = [r.sizes for r in plan.regimes if r.kind == "prefill"]
    tokens, sequences = (max(s[name] for s in sizes) for name in ("tokens", "sequences"))
    parts: list[list[int]] = [[]]
    room = tokens
    for index, length in enumerate(lengths):
        if parts[-1] and (length > room or len(parts[-1]) == sequences):
            parts.append([])
            room = tokens
        parts[-1].append(index)
        room -= length
    return parts


def prefill_choice(below: int, most: int, sequences: int, lengths: Sequence[int]) -> list[int]:
    """Prompts by index whose tokens together are more than `below` and at most `most`; or none.

    Short ones first: the first prompt, the long one, is taken last.
    """
    chosen, total = [], 0
    for index in [*range(1, len(lengths)), 0]:
        if total > below:
            break
        if total + lengths[index] <= most and len(chosen) < sequences:
            chosen.append(index)
            total += lengths[index]
    return chosen if total > below else []
