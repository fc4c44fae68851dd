"""Starting and ending the process that speaks HTTP, from the process of the engine.

In: an address and what is served. Out: the `LinePipe` to it. The port is taken before anything is
loaded, so that one in use is told at once.
"""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import sitsc
from sitsc.core.errors import ExecutionError, OptionError
from sitsc.runtime.server.line_pipe import LinePipe

_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_BACKLOG, _PATIENCE_S = 2048, 5.0
_MODULE = "sitsc.runtime.server.http_front"


def check_packages() -> None:
    """Raises OptionError where a package that only serving needs is missing."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise OptionError(
                f"sitsc serve needs {name}, which is not installed",
                hint="pip install 'sitsc[serve]'",
            )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `port` 0 takes a free one. Raises OptionError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
            listening.listen(_BACKLOG)
        except BaseException:
            listening.close()
            raise
    except (OSError, UnicodeError) as error:
        raise OptionError(
            f"{host}:{port} cannot be listened on: {error}",
            hint="another --host, another --port, or 0 for a free one",
        ) from None
    return listening


def _path() -> str:
    """Where modules are found: this package first, however it was found here."""
    own = str(Path(sitsc.__file__).resolve().parents[1])
    return os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH", ""))))


class FrontProcess:
    """The running process. Use as a context: it has ended at the end."""

    def __init__(self, listening: socket.socket, hello: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        numbers = (theirs.fileno(), listening.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, *map(str, numbers)],  # -P: not what lies around
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": _path()},
            process_group=0,  # the signals of a terminal are not for it
        )
        theirs.close()
        listening.close()
        self._end = ours
        self.pipe = LinePipe(ours)
        self.pipe.send(hello)

    def __enter__(self) -> "FrontProcess":
        return self

    def __exit__(self, *error: object) -> None:
        """Let go of it; it ends by itself, or is ended."""
        self._end.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def check(self) -> None:
        """Raises ExecutionError when it has ended."""
        if (code := self._process.poll()) is not None:
            raise ExecutionError(
                f"the process that speaks HTTP ended with code {code}", hint="see what it printed"
            )
