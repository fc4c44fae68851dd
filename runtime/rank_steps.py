"""Steps over several ranks: rank 0 schedules and samples, all compute their part.

In: a `StepBatch` on rank 0. Out: its tokens there. A step travels from stage to stage with what
crosses the bound; the ranks of a stage compute it together; logits go back to rank 0. As many steps
as there are stages may be under way, so that all stages work.
"""

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sitsc.core.plan import Stage
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.wire import STOP, decode, encode
from sitsc.runtime.cpu_executor import CpuExecutor
from sitsc.runtime.rank_messages import Messages, answer_of, lost, together
from sitsc.runtime.ranks import World
from sitsc.runtime.sampler import Sampler, SamplerRow
from sitsc.runtime.steps import Sampled

_LENGTH, _STEP, _LOGITS, _VALUE = 1, 2, 3, 4  # tags of messages; a value's number is added
_PATIENCE = 20.0  # times the predicted time of a step, before its rank counts as stuck


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that was submitted; `logits` where this rank has them itself."""

    rows: tuple[SamplerRow, ...]
    logits: Tensor | None
    sent: Messages


class RankSteps:
    """The `StepExecutor` of rank 0, and the loop of every other rank."""

    def __init__(self, executor: CpuExecutor, stage: Stage, world: World, sampler: Sampler) -> None:
        self._executor, self._stage, self._world = executor, stage, world
        self._sampler = sampler
        self.rank, self.num_ahead = world.rank, world.pp - 1
        self._closed = False
        self._owed: deque[_Step] = deque()  # steps whose logits have not come yet
        self._width = executor.plan.tokens.logits_width

    # --- rank 0 -------------------------------------------------------------------------------

    def submit(self, batch: StepBatch, rows: Sequence[SamplerRow]) -> _Step:
        """Compute the first stage and send the step on."""
        numbers, sent = torch.tensor(encode(batch)), Messages()
        with together(self._world):
            for rank in range(1, self._world.tp):
                _send_step(sent, numbers, rank)
            outputs = self._compute(batch)
            if self._world.pp > 1:
                self._pass_on(numbers, outputs, sent)
        if self._world.pp == 1:
            return _Step(tuple(rows), outputs[0][: len(rows)], sent)
        self._owed.append(_Step(tuple(rows), None, sent))
        return self._owed[-1]

    def collect(self, step: _Step) -> Sampled:
        """Wait for the logits, and sample."""
        logits = step.logits
        with together(self._world):
            if logits is None:
                logits = answer_of(step, self._owed, self._logits)
            step.sent.wait()
        return self._sampler.sample(logits, list(step.rows))

    def _logits(self, step: _Step) -> Tensor:
        """The logits that come next, those of this step."""
        logits = torch.empty(len(step.rows), self._width)
        if step.rows:
            self._receive(logits, self._world.last, _LOGITS)
        return logits

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Let all other ranks end, and do without them from now on. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        sent = Messages()
        for rank in range(1, self._world.tp) if self._world.rank == 0 else ():
            sent.add(torch.tensor([STOP]), rank, _LENGTH)
        if not self._world.is_last:
            sent.add(torch.tensor([STOP]), self._world.after, _LENGTH)
        with suppress(RuntimeError):  # a rank that is lost need not be told
            sent.wait()
        self._world.watch.stop()
        dist.destroy_process_group()

    # --- other ranks --------------------------------------------------------------------------

    def serve(self) -> None:
        """Compute steps as they come, until rank 0 ends. Raises RankError, ExecutionError."""
        world, length = self._world, torch.empty(1, dtype=torch.int64)
        while True:
            self._quiet_receive(length)
            if int(length) == STOP:
                break
            with together(self._world):
                numbers = torch.empty(int(length), dtype=torch.int64)
                self._receive(numbers, world.before, _STEP)
                batch = decode(numbers.tolist())
                if world.stage:
                    self._incoming(batch)
                outputs, sent = self._compute(batch), Messages()
                if not world.is_last:
                    self._pass_on(numbers, outputs, sent)
                elif world.tp_rank == 0 and world.stage and len(batch.sampled_ids):
                    sent.add(outputs[0], 0, _LOGITS)
                with world.watch.waiting():
                    sent.wait()
        self.close()

    def _quiet_receive(self, length: Tensor) -> None:
        """Wait for the next step; for as long as rank 0 has nothing to do."""
        try:
            dist.recv(length, self._world.before, tag=_LENGTH)
        except RuntimeError as error:
            raise lost(self._world, error) from error

    # --- messages -----------------------------------------------------------------------------

    def _pass_on(self, numbers: Tensor, outputs: list[Tensor], sent: Messages) -> None:
        """The step and what crosses the bound, to the rank of the same number."""
        after = self._world.after
        _send_step(sent, numbers, after)
        for index, value in enumerate(outputs):
            sent.add(value.clone(memory_format=torch.contiguous_format), after, _VALUE + index)

    def _incoming(self, batch: StepBatch) -> None:
        """What crosses the bound into this stage, received in its place in the arena."""
        for index, value in enumerate(self._executor.places(batch, self._stage.receives)):
            self._receive(value, self._world.before, _VALUE + index)

    def _receive(self, tensor: Tensor, source: int, tag: int) -> None:
        with self._world.watch.waiting():
            dist.recv(tensor, source, tag=tag)

    def _compute(self, batch: StepBatch) -> list[Tensor]:
        with self._world.watch.busy(_PATIENCE * self._executor.predicted_s(batch)):
            return self._executor.outputs(batch)


def _send_step(sent: Messages, numbers: Tensor, to: int) -> None:
    sent.add(torch.tensor([len(numbers)]), to, _LENGTH)
    sent.add(numbers, to, _STEP)
