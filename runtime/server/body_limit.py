"""A bound on the size of request bodies, whether or not they say it before."""

from typing import Any

from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sitsc.runtime.server.openai_answers import error_body

_TOO_LARGE = 413


class BodyLimit:
    """ASGI middleware: a body of more than `max_bytes` is answered with 413."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what comes in."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._max_bytes:
            await self._refusal()(scope, receive, send)
            return
        await self._app(scope, self._counting(receive), send)

    def _counting(self, receive: Receive) -> Receive:
        count = 0

        async def counted() -> Message:
            nonlocal count
            message = await receive()
            count += len(message.get("body", b""))
            if count > self._max_bytes:
                raise HTTPException(_TOO_LARGE, self._what)
            return message

        return counted

    @property
    def _what(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes"

    def _refusal(self) -> Any:
        return JSONResponse(error_body(self._what, _TOO_LARGE), _TOO_LARGE)
