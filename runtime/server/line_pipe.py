"""JSON lines over a socket for the process of the engine: it never waits unless it is idle.

What the other side does not read yet is kept and sent later. Not thread-safe.
"""

import json
import select
import socket
from typing import Any

from sitsc.core.errors import ExecutionError

_PIECE_BYTES = 1 << 18


def line_of(value: Any) -> bytes:
    """A JSON value as it is sent."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


class LinePipe:
    """One end of a stream socket. `receive` raises ExecutionError when the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._unsent, self._unread = bytearray(), bytearray()
        self._ended = False

    def send(self, value: Any) -> None:
        """Send a JSON value as soon as the other side takes it."""
        self._unsent += line_of(value)
        self.flush()

    def flush(self) -> None:
        """Send what the other side takes now; `receive` tells when it is gone."""
        try:
            while self._unsent:
                del self._unsent[: self._end.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True
            self._unsent.clear()

    def receive(self) -> list[Any]:
        """The values that have come, in order; none if there are none yet.

        Raises when nothing more can come, after the last of them was given out.
        """
        try:
            while piece := self._end.recv(_PIECE_BYTES):
                self._unread += piece
            self._ended = True
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True
        if self._ended and b"\n" not in self._unread:
            raise _gone()
        self.flush()
        *lines, rest = self._unread.split(b"\n") if self._unread else [b""]
        self._unread = bytearray(rest)
        return [json.loads(line) for line in lines]

    def wait(self, seconds: float) -> None:
        """Until something comes, or what is kept can be sent, or the time is over."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(1e3 * seconds)


def _gone() -> ExecutionError:
    return ExecutionError("the process that speaks HTTP has ended", hint="see what it printed")
