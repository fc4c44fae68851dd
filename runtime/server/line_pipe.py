"""JSON lines over a socket for the process of the engine: it never waits unless it is idle.

What the other side does not read yet is kept and sent later. Not thread-safe.
"""

import json
import select
import socket
from typing import Any

from sitsc.core.errors import ExecutionError

_PIECE_BYTES = 1 << 18


class LinePipe:
    """One end of a stream socket. Raises ExecutionError when the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent, self._unread = bytearray(), bytearray()

    def send(self, value: Any) -> None:
        """Send a JSON value as soon as the other side takes it."""
        self._unsent += json.dumps(value, separators=(",", ":")).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what the other side takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise _gone() from error

    def receive(self) -> list[Any]:
        """The values that have come, in order; none if there are none yet."""
        self.flush()
        try:
            while piece := self._end.recv(_PIECE_BYTES):
                self._unread += piece
            raise _gone()
        except BlockingIOError:
            pass
        except OSError as error:
            raise _gone() from error
        *lines, rest = self._unread.split(b"\n") if self._unread else [b""]
        self._unread = bytearray(rest)
        return [json.loads(line) for line in lines]

    def wait(self, seconds: float) -> None:
        """Until something comes, or what is kept can be sent, or the time is over."""
        select.select([self._end], [self._end] if self._unsent else [], [], seconds)


def _gone() -> ExecutionError:
    return ExecutionError("the process that speaks HTTP has ended", hint="see what it printed")
