"""The process that speaks HTTP: `python -m sitsc.runtime.server.http_front PIPE LISTENING`.

In: two inherited sockets, one to the engine's process and one that listens. Ends when the engine
says so or is gone. Never imports torch.
"""

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn

from sitsc.core.errors import SitscError
from sitsc.runtime.server.engine_client import EngineClient
from sitsc.runtime.server.http_app import Served, make_app
from sitsc.runtime.server.prompt_texts import PromptTexts
from sitsc.runtime.server.serve_metrics import ServeMetrics

_CLOSING_S = 2  # left to connections when all answers have ended
_HEADROOM_BYTES, _BYTES_A_TOKEN = 1 << 20, 64  # a body: JSON of ids, or escaped text


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: the engine's process says when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(pipe: socket.socket, listening: socket.socket) -> None:
    """Serve until the engine ends. Raises SitscError for files that cannot be read."""
    hello = _hello(pipe)
    client = EngineClient(hello["most_open"])
    texts = PromptTexts.open(hello)
    metrics = ServeMetrics(hello["model"], lambda: client.load, hello["kv_pages"])
    served = Served(client, texts, metrics, hello["model"], hello["facts"])
    limit = _HEADROOM_BYTES + _BYTES_A_TOKEN * texts.context_tokens
    config = uvicorn.Config(
        make_app(served, limit),
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_CLOSING_S,
        http="h11",  # it bounds headers
        ws="none",
    )
    server = _Server(config)
    await client.connect(pipe)
    serving = asyncio.ensure_future(server.serve(sockets=[listening]))
    ending = asyncio.ensure_future(_end(client))
    await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    await serving
    await ending
    await client.bye()


async def _end(client: EngineClient) -> None:
    """Until the engine ends, and open answers have."""
    seconds = await client.read()
    if seconds is not None:
        await client.drain(seconds)


def _hello(pipe: socket.socket) -> dict[str, Any]:
    """The first line, which says what is served; read byte by byte, so that no more is taken."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = pipe.recv(1)
        if not byte:
            raise SystemExit(1)
        line += byte
    return json.loads(line)


def main() -> int:
    """Serve; the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    pipe, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    pipe.setblocking(True)
    try:
        asyncio.run(serve(pipe, listening))
    except SitscError as error:
        print(f"sitsc: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
