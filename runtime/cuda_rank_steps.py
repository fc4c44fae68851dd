"""Steps over several GPUs: rank 0 schedules, every rank launches its own graphs.

In: a `StepBatch` on rank 0. Out: its tokens there. A step goes to all ranks as whole numbers; the
GPUs exchange sums, logits, sampled ids and what crosses from stage to stage themselves, so that no
rank waits for another on the host. With several stages the last one samples: it gets the fields of
the sampled rows with the step, and sends the ids back.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.sampling_rows import sampling_error
from sitsc.core.serving.step_stream import StepReader, StepWriter
from sitsc.core.serving.wire import STOP
from sitsc.runtime.cuda_executor import CudaExecutor, StepInFlight
from sitsc.runtime.rank_messages import Messages, answer_of, together
from sitsc.runtime.ranks import World
from sitsc.runtime.row_fields import RecordedFields, read_fields
from sitsc.runtime.sampler import SamplerRow
from sitsc.runtime.steps import Sampled

_LENGTH, _STEP, _FIELDS, _IDS = 1, 2, 3, 4  # tags of messages


@dataclass(slots=True)
class _Flight:
    """A step that was submitted; `step` is None where another rank samples its `rows`."""

    rows: int
    step: StepInFlight | None = None
    sent: Messages = field(default_factory=Messages)


class CudaRankSteps:
    """The `StepExecutor` of rank 0, and the loop of every other rank."""

    def __init__(self, executor: CudaExecutor, world: World) -> None:
        self._executor, self._world = executor, world
        self.rank = world.rank
        self.num_ahead = world.pp  # with one stage as of one GPU: a step
        self._writer, self._closed = StepWriter(), False
        self._owed: deque[_Flight] = deque()  # steps whose ids have not come yet
        self._answers: queue.Queue[StepInFlight | None] = queue.Queue()

    # --- rank 0 -------------------------------------------------------------------------------

    def submit(self, batch: StepBatch, rows: Sequence[SamplerRow]) -> _Flight:
        """Tell the others, then start the step here."""
        world, flight = self._world, _Flight(len(rows))
        message = torch.tensor(self._writer.message(batch))
        fields = RecordedFields(self._executor.plan)
        if world.pp > 1:
            self._executor.write_rows(fields, batch, rows)
        data = fields.tensor()
        with together(self._world):
            for rank in range(1, world.tp * world.pp):
                told = len(data) if rank >= world.last else 0
                flight.sent.add(torch.tensor([len(message), told]), rank, _LENGTH)
                flight.sent.add(message, rank, _STEP)
                if told:
                    flight.sent.add(data, rank, _FIELDS)
            with world.watch.busy():
                if world.pp > 1:
                    self._executor.follow(batch, alone=True)
                    self._owed.append(flight)
                else:
                    flight.step = self._executor.submit(batch, rows)
        return flight

    def collect(self, step: _Flight) -> Sampled:
        """Wait for the tokens of a step."""
        with together(self._world), self._world.watch.on_device():
            step.sent.wait()
            if step.step is not None:
                return self._executor.collect(step.step)
            ids = answer_of(step, self._owed, self._ids)
        return [sampling_error(id) or id for id in ids.tolist()]

    def _ids(self, step: _Flight) -> torch.Tensor:
        """The ids that come next, those of this step."""
        ids = torch.empty(step.rows, dtype=torch.int64)
        if step.rows:
            dist.recv(ids, self._world.last, tag=_IDS)
        return ids

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._executor.forget(request_id)

    def close(self) -> None:
        """Let all other ranks end, and do without them from now on. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        world, farewell = self._world, Messages()
        with suppress(RuntimeError):  # a rank that is lost need not be told
            for rank in range(1, world.tp * world.pp) if world.rank == 0 else ():
                farewell.add(torch.tensor([STOP, 0]), rank, _LENGTH)
            farewell.wait()
        torch.cuda.synchronize()
        world.watch.stop()
        dist.destroy_process_group()

    # --- other ranks --------------------------------------------------------------------------

    def serve(self) -> None:
        """Launch steps as they come, until rank 0 ends. Raises RankError, ExecutionError."""
        answering = self._answering()
        length, reader, world = torch.empty(2, dtype=torch.int64), StepReader(), self._world
        while True:
            with together(self._world):
                dist.recv(length, 0, tag=_LENGTH)
                count, told = length.tolist()
                if count == STOP:
                    break
                message = torch.empty(count, dtype=torch.int64)
                data = torch.empty(told, dtype=torch.uint8)
                with world.watch.waiting():
                    dist.recv(message, 0, tag=_STEP)
                    if told:
                        dist.recv(data, 0, tag=_FIELDS)
                with world.watch.busy():
                    fields = read_fields(self._executor.plan, data)
                    batch = reader.step(message.tolist())
                    flight = self._executor.follow(batch, fields, alone=world.pp > 1)
                    if answering is not None and flight.rows:
                        self._answers.put(flight)
        if answering is not None:
            self._answers.put(None)
            answering.join()
        self.close()

    def _answering(self) -> threading.Thread | None:
        """A thread that sends sampled ids to rank 0, on the rank that has them for it."""
        if self._world.pp == 1 or self._world.rank != self._world.last:
            return None
        thread = threading.Thread(target=self._answer, name="sampled ids", daemon=True)
        thread.start()
        return thread

    def _answer(self) -> None:
        with suppress(RuntimeError):  # the network failed: the main thread tells who is lost
            while (flight := self._answers.get()) is not None:
                flight.done.synchronize()
                dist.send(flight.host[: flight.rows].clone(), 0, tag=_IDS)
