"""The HTTP side's view of the engine: requests go out, pieces of answers come back.

In: token ids and options. Out: pieces of each answer as they come, or an error a request. One task
reads the pipe; nothing here blocks.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sitsc.core.errors import RequestError, SitscError
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.server.line_pipe import line_of

_LONGEST_LINE = 1 << 26  # bytes


class BusyError(SitscError):
    """The server takes no request now: it starts, ends, or has too many."""


class EngineError(SitscError):
    """A step failed, or the engine is gone: not the request's fault."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one answer of a request; the last has a reason or an error."""

    answer: int
    text: str = ""
    num_tokens: int = 0
    reason: str | None = None
    error: SitscError | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine does: requests in the batch and before it, pages without a user."""

    running: int = 0
    waiting: int = 0
    free_pages: int = 0


@dataclass(eq=False, slots=True)
class Answers:
    """The answers of one HTTP request, as they come."""

    keys: list[int] = field(default_factory=list)
    pieces: asyncio.Queue[Piece] = field(default_factory=asyncio.Queue)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces until all answers have ended. Raises the first error."""
        left = len(self.keys)
        while left:
            piece = await self.pieces.get()
            if piece.error is not None:
                raise piece.error
            left -= piece.reason is not None
            yield piece


class EngineClient:
    """Sends requests to the engine. `most_open` answers may be open at a time."""

    def __init__(self, most_open: int) -> None:
        self.load = Load()
        self.state = "starting"  # then "ready", "ending", "lost"
        self._most_open = most_open
        self._open: dict[int, tuple[Answers, int]] = {}
        self._next = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def connect(self, end: Any) -> None:
        """Use this socket."""
        self._reader, self._writer = await asyncio.open_connection(sock=end, limit=_LONGEST_LINE)

    @property
    def num_open(self) -> int:
        """Answers that have not ended."""
        return len(self._open)

    def check(self, more: int = 1) -> None:
        """Raises BusyError where `more` answers cannot be taken now, RequestError where never."""
        if self.state != "ready":
            raise BusyError(f"the server is {self.state}", hint="try again later")
        if more > self._most_open:
            raise RequestError(
                f"{more} answers to one request, the server takes {self._most_open}",
                hint="a smaller n, or fewer prompts",
            )
        if self.num_open + more > self._most_open:
            raise BusyError(
                f"{self.num_open} answers are open, the server takes {self._most_open}",
                hint="try again later, or serve with a larger --max-waiting",
            )

    def ask(self, prompts: Sequence[list[int]], options: Sequence[SamplingOptions]) -> Answers:
        """One answer to each prompt. Raises BusyError; `close` the answers in the end."""
        self.check(len(prompts))
        answers = Answers()
        for index, (ids, option) in enumerate(zip(prompts, options, strict=True)):
            key, self._next = self._next, self._next + 1
            answers.keys.append(key)
            self._open[key] = answers, index
            self._send({"ask": key, "ids": ids, "options": asdict(option)})
        self._empty.clear()
        return answers

    def close(self, answers: Answers) -> None:
        """Nobody waits for these any more: those that have not ended are aborted."""
        for key in answers.keys:
            if self._open.pop(key, None) is not None and self.state != "lost":
                self._send({"abort": key})
        self._note_empty()

    async def read(self) -> float | None:
        """Take in what the engine sends; the seconds that are left when it ends, None if lost."""
        while True:
            try:
                line = await self._reader.readline()
            except (OSError, ValueError):
                line = b""
            if not line.endswith(b"\n"):
                self.state = "lost"
                self._fail(EngineError("the engine has ended"))
                return None
            message = json.loads(line)
            if "outputs" in message:
                self.load = Load(*message["load"])
                for output in message["outputs"]:
                    self._deliver(*output)
            elif "ready" in message:
                self.state, self.load = "ready", Load(*message["load"])
                self._send({"listening": True})
            elif "drain" in message:
                self.state = "ending"
                return message["drain"]

    async def drain(self, seconds: float) -> None:
        """Until no answer is open, or the time is over; what is open then fails."""
        reading = asyncio.ensure_future(self.read())
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            for key in self._open:
                self._send({"abort": key})
            self._fail(BusyError("the server has ended before the answer", hint="ask again"))
        finally:
            reading.cancel()

    async def bye(self) -> None:
        """Tell the engine that nothing more will come."""
        if self.state != "lost":
            self._send({"bye": True})
            await self._writer.drain()

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(line_of(message))

    def _deliver(
        self, key: int, text: str, num_tokens: int, reason: str | None, wrong: list[Any] | None
    ) -> None:
        found = self._open.get(key)
        if found is None:  # aborted, its last outputs still on their way
            return
        answers, index = found
        error = None
        if wrong is not None:
            what, refused = wrong
            error = RequestError(what) if refused else EngineError(what)
        elif reason == "abort":
            error = EngineError("the request was aborted")
        answers.pieces.put_nowait(Piece(index, text, num_tokens, reason, error))
        if reason is not None:
            del self._open[key]
            self._note_empty()

    def _fail(self, error: SitscError) -> None:
        for answers, index in self._open.values():
            answers.pieces.put_nowait(Piece(index, reason="error", error=error))
        self._open.clear()
        self._note_empty()

    def _note_empty(self) -> None:
        if not self._open:
            self._empty.set()
