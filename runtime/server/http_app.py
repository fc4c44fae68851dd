"""The HTTP interface: completions and chats as OpenAI's clients ask for them, health, metrics.

In: HTTP. Out: answers from an `EngineClient`, whole or as server-sent events. A client that leaves
ends its answers. Mistakes are told in the API's own form with a hint.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.datastructures import State
from starlette.exceptions import HTTPException

from sitsc import __version__
from sitsc.core.errors import SitscError
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.server.body_limit import BodyLimit
from sitsc.runtime.server.engine_client import Answers, BusyError, EngineClient, Piece
from sitsc.runtime.server.openai_answers import Body, error_body, error_event, status_of
from sitsc.runtime.server.openai_requests import ChatRequest, CompletionRequest, param_of
from sitsc.runtime.server.prompt_texts import PromptTexts
from sitsc.runtime.server.request_count import ARRIVED, CLIENT_LEFT, STATUS, RequestCount
from sitsc.runtime.server.serve_metrics import CONTENT_TYPE, ServeMetrics

_RETRY_S = "1"
_THREADS = 2  # that make ids of text
_ANSWERS = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True)
class Served:
    """What an app needs: the engine, prompts, metrics, and what it says of itself."""

    client: EngineClient
    texts: PromptTexts
    metrics: ServeMetrics
    model: str
    facts: dict[str, Any]
    created: int = field(default_factory=lambda: int(time.time()))
    making: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_THREADS))


class UnknownModelError(SitscError):
    """The request names another model."""


def make_app(served: Served, max_body_bytes: int) -> FastAPI:
    """The application."""
    app = FastAPI(version=__version__, openapi_url=None, redirect_slashes=False)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    app.add_middleware(RequestCount, metrics=served.metrics, paths=_ANSWERS)
    _add_errors(app)
    _add_facts(app, served)

    @app.post("/v1/completions", response_model=None)
    async def completions(request: CompletionRequest, http: Request) -> Response:
        given = request.prompts()
        _check(served, request, len(given) * request.n)
        prompts = await _made(served, lambda: [served.texts.ids(prompt) for prompt in given])
        return await _answer(served, request, prompts, "text_completion", http)

    @app.post("/v1/chat/completions", response_model=None)
    async def chats(request: ChatRequest, http: Request) -> Response:
        _check(served, request, request.n)
        prompts = await _made(served, lambda: [served.texts.chat_ids(request.messages)])
        return await _answer(served, request, prompts, "chat.completion", http)

    del completions, chats  # registered
    return app


def _check(served: Served, request: CompletionRequest | ChatRequest, answers: int) -> None:
    """What can be known before ids are made. Raises SitscError."""
    if request.model is not None:
        _check_model(served, request.model)
    request.check()
    served.client.check(answers)


def _check_model(served: Served, name: str) -> None:
    if name != served.model:
        raise UnknownModelError(
            f"there is no model {name!r} here", hint=f"this server has {served.model!r}"
        )


async def _made(served: Served, make: Callable[[], list[list[int]]]) -> list[list[int]]:
    """Ids of texts, made beside the loop that all streams need: a long text takes seconds."""
    async with served.making:
        return await asyncio.to_thread(make)


async def _answer(
    served: Served,
    request: CompletionRequest | ChatRequest,
    prompts: Sequence[list[int]],
    kind: str,
    http: Request,
) -> Response:
    each: list[list[int]] = []
    options: list[SamplingOptions] = []
    for ids in prompts:
        room = served.texts.context_tokens - len(ids)
        options += request.options(request.num_tokens(room))
        each += [ids] * request.n
    body = Body(kind, served.model, sum(map(len, prompts)), len(each))
    answers = served.client.ask(each, options)
    running = _Running(served, answers, body, getattr(http.state, ARRIVED))
    if request.stream:
        events = running.events(request.usage_wanted, http.state)
        return StreamingResponse(events, media_type="text/event-stream", headers=_UNBUFFERED)
    return await _unless_left(http, running.whole())


_UNBUFFERED = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _Running:
    """One request that is being answered. As a context: nobody waits for it afterwards."""

    def __init__(self, served: Served, answers: Answers, body: Body, arrived: float) -> None:
        self._served, self._answers, self._body = served, answers, body
        self._arrived = arrived
        self._first: dict[int, float] = {}
        self._tokens = [0] * body.num_answers
        self._open = set(range(body.num_answers))
        served.metrics.prompt(body.prompt_tokens)

    async def whole(self) -> Response:
        """The answer when all of it is there."""
        with self:
            async for piece in self._answers:
                self._count(piece)
                self._body.add(piece)
        return JSONResponse(self._body.whole())

    async def events(self, usage: bool, state: State) -> AsyncIterator[bytes]:
        """The answer as it comes; an error is the last event, without [DONE] after it."""
        try:
            with self:
                for chunk in self._body.begin():
                    yield chunk
                async for piece in self._answers:
                    self._count(piece)
                    self._body.completion_tokens += piece.num_tokens
                    if chunks := self._body.chunks(piece):
                        yield b"".join(chunks)
        except SitscError as error:
            setattr(state, STATUS, status_of(error))
            yield error_event(error)
            return
        yield b"".join(self._body.end(usage))

    def __enter__(self) -> "_Running":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._served.client.close(self._answers)
        reason = "error" if isinstance(error, Exception) else "abort"
        for answer in self._open:
            self._ended(answer, reason, time.perf_counter())

    def _count(self, piece: Piece) -> None:
        now, metrics = time.perf_counter(), self._served.metrics
        if piece.num_tokens:
            metrics.token(piece.num_tokens)
            self._tokens[piece.answer] += piece.num_tokens
            if piece.answer not in self._first:
                self._first[piece.answer] = now
                metrics.first(now - self._arrived)
        if piece.reason is not None:
            self._open.remove(piece.answer)
            self._ended(piece.answer, piece.reason, now)

    def _ended(self, answer: int, reason: str, now: float) -> None:
        since = now - self._first.get(answer, now)
        self._served.metrics.answer(reason, since, self._tokens[answer])


async def _unless_left(http: Request, answer: Awaitable[Response]) -> Response:
    """The answer, unless its client leaves before: then it is cancelled."""
    answering, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(_left(http))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            return Response(status_code=CLIENT_LEFT)
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _left(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


# --- what a server says of itself -------------------------------------------------------------


def _add_facts(app: FastAPI, served: Served) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        state = served.client.state
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(served)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(served, name)
        return _model(served)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": __version__, **served.facts}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(served.metrics.text(), media_type=CONTENT_TYPE)

    del health, models, model, version, metrics  # registered


def _model(served: Served) -> dict[str, Any]:
    return {
        "id": served.model,
        "object": "model",
        "created": served.created,
        "owned_by": "sitsc",
        "max_model_len": served.texts.context_tokens,
    }


# --- mistakes ---------------------------------------------------------------------------------


def _add_errors(app: FastAPI) -> None:
    async def refused(http: Request, error: SitscError) -> Response:
        status = 404 if isinstance(error, UnknownModelError) else status_of(error)
        headers = {"Retry-After": _RETRY_S} if isinstance(error, BusyError) else None
        return _told(status, str(error), param_of(error), headers)

    async def invalid(http: Request, error: RequestValidationError) -> Response:
        """The first mistake of a body that does not fit."""
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        if first["type"] == "json_invalid":
            return _told(400, f"the body is not JSON at character {where[0]}")
        if not where:
            return _told(400, "the body is no JSON object — send Content-Type: application/json")
        message = f"{'.'.join(where)}: {first['msg']}"
        return _told(400, message, where[0])

    async def no_route(http: Request, error: HTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return _told(error.status_code, message, headers=error.headers)

    async def broken(http: Request, error: Exception) -> Response:
        """A bug of ours: told without its inside, which goes to stderr."""
        return _told(500, f"an error of the server: {type(error).__name__}")

    handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]] = {
        SitscError: refused,
        RequestValidationError: invalid,
        HTTPException: no_route,
        Exception: broken,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _told(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    return JSONResponse(error_body(message, status, param), status, headers)
