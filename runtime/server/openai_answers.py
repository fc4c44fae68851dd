"""Answers in the form of the OpenAI API: whole bodies, chunks of a stream, errors."""

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from sitsc.core.errors import SitscError
from sitsc.runtime.server.engine_client import BusyError, EngineError, Piece

DONE = b"data: [DONE]\n\n"
_PREFIX = {"text_completion": "cmpl-", "chat.completion": "chatcmpl-"}


@dataclass(slots=True)
class Body:
    """One answer to an HTTP request, put together from pieces. `kind` is the object's name."""

    kind: str
    model: str
    prompt_tokens: int
    num_answers: int
    id: str = field(init=False)
    created: int = field(init=False)
    texts: list[list[str]] = field(init=False)
    reasons: list[str | None] = field(init=False)
    completion_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.id, self.created = _PREFIX[self.kind] + uuid.uuid4().hex, int(time.time())
        self.texts = [[] for _ in range(self.num_answers)]
        self.reasons = [None] * self.num_answers

    @property
    def chat(self) -> bool:
        """Whether it answers messages."""
        return self.kind == "chat.completion"

    def add(self, piece: Piece) -> None:
        """Take in a piece."""
        self.completion_tokens += piece.num_tokens
        self.texts[piece.answer].append(piece.text)
        self.reasons[piece.answer] = piece.reason or self.reasons[piece.answer]

    def whole(self) -> dict[str, Any]:
        """The body of a request that does not stream."""
        choices = []
        for index, (texts, reason) in enumerate(zip(self.texts, self.reasons, strict=True)):
            text = "".join(texts)
            message = {"role": "assistant", "content": text}
            said = {"message": message} if self.chat else {"text": text}
            choices.append({"index": index, **said, "logprobs": None, "finish_reason": reason})
        return self._head(self.kind) | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens of prompts and of answers."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def begin(self) -> list[bytes]:
        """Chunks before the first token: chats say who speaks."""
        if not self.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, {"delta": delta}, None) for index in range(self.num_answers)]

    def chunks(self, piece: Piece) -> list[bytes]:
        """The chunks of a piece; none while nothing is to be shown."""
        if not self.chat:
            if not piece.text and piece.reason is None:
                return []
            return [self._chunk(piece.answer, {"text": piece.text}, piece.reason)]
        found = []
        if piece.text:
            found.append(self._chunk(piece.answer, {"delta": {"content": piece.text}}, None))
        if piece.reason is not None:
            found.append(self._chunk(piece.answer, {"delta": {}}, piece.reason))
        return found

    def end(self, usage: bool) -> list[bytes]:
        """The chunks after the last token."""
        last = [_event(self._head(self._chunk_kind) | {"choices": [], "usage": self.usage()})]
        return (last if usage else []) + [DONE]

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else self.kind

    def _chunk(self, index: int, said: dict[str, Any], reason: str | None) -> bytes:
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return _event(self._head(self._chunk_kind) | {"choices": [choice]})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def status_of(error: SitscError) -> int:
    """The HTTP status of an error."""
    if isinstance(error, BusyError):
        return 503
    if isinstance(error, EngineError):
        return 500
    return 400


def error_body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """An error as clients of the API read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_event(error: SitscError) -> bytes:
    """An error in a stream that has begun."""
    return _event(error_body(str(error), status_of(error)))
