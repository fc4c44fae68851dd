"""The engine's side of the server: takes requests from the pipe, makes steps, sends outputs.

In: an engine, and a `LinePipe` to the process that speaks HTTP. Out: one message a step. Runs in
the main thread and never waits for HTTP. Messages are told in `docs/serve.md`.
"""

import math
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from sitsc.core.errors import DeviceError, ExecutionError, RankError, SitscError
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.engine import Engine, Output
from sitsc.runtime.server.line_pipe import LinePipe
from sitsc.runtime.server.serve_times import ServeTimes

_IDLE_S = 0.2  # how soon a signal is seen while nothing is served
_CLOSING_S = 10.0  # beyond the time of open requests, left to the process that speaks HTTP
_MOST_FAILURES = 3  # steps in a row that fail before serving ends
_FATAL = (RankError, DeviceError)


class EngineService:
    """Serves one engine until it is told to end.

    `drain_s` seconds are left to open requests; `listening` is called when requests are taken.
    """

    def __init__(
        self, engine: Engine, pipe: LinePipe, drain_s: float, listening: Callable[[], None]
    ) -> None:
        self._engine, self._pipe, self._drain_s = engine, pipe, drain_s
        self._listening = listening
        self.times = ServeTimes()
        self._keys: dict[int, int] = {}  # request of the engine → number of the other process
        self._ids: dict[int, int] = {}  # and back
        self._signals = 0
        self._over = False
        self._deadline = math.inf  # when it ends even if the other process does not answer
        self._failures = 0

    def end_by_signals(self) -> None:
        """From now on SIGINT and SIGTERM end `run` softly; a second one ends it at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._signal)

    def run(self) -> None:
        """Serve. Raises ExecutionError, RankError or DeviceError when it cannot go on."""
        self._pipe.send({"ready": True, "load": self._load()})
        while not self._over:
            if not self._engine.has_work:
                self._pipe.wait(_IDLE_S)
            for message in self._pipe.receive():
                self._take(message)
            if self._signals and self._deadline == math.inf:
                self._deadline = time.monotonic() + self._drain_s + _CLOSING_S
                self._pipe.send({"drain": self._drain_s})
            self._over = self._over or time.monotonic() > self._deadline
            if self._engine.has_work:
                self._step()

    def _signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self._signals += 1
        if self._signals > 1:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"ask": key, "ids": ids, "options": options}:
                self._ask(key, ids, options)
            case {"abort": key}:
                if (request_id := self._ids.get(key)) is not None:
                    self._engine.abort(request_id)
            case {"listening": _}:
                self._listening()
            case {"bye": _}:
                self._over = True
            case _:
                raise AssertionError(f"an unknown message: {message}")

    def _ask(self, key: int, ids: list[int], options: dict[str, Any]) -> None:
        now = time.perf_counter()
        try:
            chosen = SamplingOptions(**{**options, "stop": tuple(options["stop"])})
            request_id = self._engine.add_request(ids, chosen)
        except SitscError as error:
            self._send([[key, "", 0, "error", [str(error), True]]])
            return
        self._keys[request_id], self._ids[key] = key, request_id
        self.times.asked(request_id, len(ids), now)

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.perf_counter()
        self.times.stepped(outputs, self._engine.scheduler.num_running, now)
        if outputs:
            self._send([self._line(output) for output in outputs])
            self._count_failures(outputs)

    def _line(self, output: Output) -> list[Any]:
        """An output as a list: number, text, tokens, why it ended, what went wrong."""
        key = self._keys[output.request_id]
        if output.finish_reason is not None:
            del self._keys[output.request_id], self._ids[key]
        error = output.error
        wrong = None if error is None else [str(error), not isinstance(error, ExecutionError)]
        return [key, output.new_text, len(output.token_ids), output.finish_reason, wrong]

    def _send(self, lines: list[list[Any]]) -> None:
        self._pipe.send({"outputs": lines, "load": self._load()})

    def _load(self) -> list[int]:
        """Sequences in the batch, sequences that wait, pages without a user."""
        scheduler = self._engine.scheduler
        return [scheduler.num_running, scheduler.num_waiting, scheduler.pages.num_free]

    def _count_failures(self, outputs: Sequence[Output]) -> None:
        """Raises the error of steps that fail again and again, or that no step will survive."""
        errors = [output.error for output in outputs if isinstance(output.error, ExecutionError)]
        self._failures = self._failures + 1 if len(errors) == len(outputs) else 0
        for error in errors:
            if isinstance(error.__cause__, _FATAL):
                raise error.__cause__
        if self._failures >= _MOST_FAILURES:
            raise errors[-1]
