"""Counts requests for answers, each once, with the status that its client saw and its time.

Also notes when a request arrived, so that times include reading its body and making ids of text.
"""

import time

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sitsc.runtime.server.serve_metrics import ServeMetrics

CLIENT_LEFT, _BROKEN = 499, 500  # the first as nginx counts it
ARRIVED, STATUS = "arrived", "status"  # in the state of a request; what a stream ended with


class RequestCount:
    """ASGI middleware for the requests to `paths`."""

    def __init__(self, app: ASGIApp, metrics: ServeMetrics, paths: tuple[str, ...]) -> None:
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count it when it has ended."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        arrived, seen, whole = time.perf_counter(), CLIENT_LEFT, False
        state = scope.setdefault("state", {})
        state[ARRIVED] = arrived

        async def counted(message: Message) -> None:
            nonlocal seen, whole
            if message["type"] == "http.response.start":
                seen = message["status"]
            elif not message.get("more_body", False):
                whole = True
            await send(message)

        left = CLIENT_LEFT
        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            left = CLIENT_LEFT if isinstance(error, ClientDisconnect) else _BROKEN
            raise
        finally:
            status = state.get(STATUS, seen if whole else left)
            self._metrics.ended(status, time.perf_counter() - arrived)
