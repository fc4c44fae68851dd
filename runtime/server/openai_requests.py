"""Requests of the OpenAI API as checked data: completions and chat completions.

In: a JSON body. Out: prompts, and `SamplingOptions` in the terms of the engine. A key that nobody
knows is an error, and so is a known one with a value that would change the answer but is not
computed here: nothing is ignored silently.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    model_validator,
)

from sitsc.core.errors import OptionError, SitscError
from sitsc.core.sampling import SamplingOptions

MOST_ANSWERS = 128  # of one request: prompts times n
_COMPLETION_TOKENS = 16  # the API's default
Ids = list[StrictInt]
Number = StrictFloat | StrictInt

# Known, not computed: the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "store": (False,),
    "metadata": ({},),
}


class RequestOptionError(OptionError):
    """An option of a request, `param`, cannot be what it is."""

    def __init__(self, param: str, what: str, hint: str) -> None:
        super().__init__(what, hint=hint)
        self.param = param


def param_of(error: SitscError) -> str | None:
    """The option that an error is about, where it is about one."""
    if isinstance(error, RequestOptionError):
        return error.param
    name = error.what.partition("=")[0] if isinstance(error, OptionError) else ""
    return name if name.isidentifier() else None


class _Body(BaseModel):
    """An object in which the null of a known name says nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = {*cls.model_fields, *_NEUTRAL}
        return {k: item for k, item in value.items() if item is not None or k not in known}


class StreamOptions(_Body):
    """What a stream holds besides the text."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False


class _Request(_Body):
    """What both kinds of request have in common; unset values are None."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    seed: StrictInt | None = None
    stop: str | list[str] | None = None
    n: StrictInt = Field(default=1, ge=1, le=MOST_ANSWERS)
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    ignore_eos: StrictBool = False
    min_tokens: StrictInt = 0
    max_tokens: StrictInt | None = None
    user: str | None = None  # whom the answer is for: changes nothing

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raises OptionError for what is unknown, or known but not computed."""
        for name, value in (self.model_extra or {}).items():
            if name not in _NEUTRAL:
                what = f"{name!r} is no option of this request"
                raise RequestOptionError(name, what, "leave it out")
            if not any(_same(value, one) for one in _NEUTRAL[name]):
                raise RequestOptionError(name, f"{name!r} is not supported", "leave it out")
        if self.stream_options is not None and not self.stream:
            what = "stream_options without stream"
            raise RequestOptionError("stream_options", what, "set stream to true")

    def options(self, max_tokens: int) -> list[SamplingOptions]:
        """The options of each of the `n` answers; a seed counts up. Raises OptionError."""
        given = {
            name: getattr(self, name)
            for name in ("top_p", "top_k", "min_p", "repetition_penalty")
            if getattr(self, name) is not None
        }
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        stop = () if stop == ("",) else stop
        first = SamplingOptions(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=self.seed,
            stop=stop,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            **given,
        )
        if self.seed is None:
            return [first] * self.n
        return [replace(first, seed=self.seed + index) for index in range(self.n)]


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: str | Ids | list[str] | list[Ids]

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as ids. Raises OptionError for none or too many."""
        found: Sequence[Any] = (
            self.prompt
            if isinstance(self.prompt, list) and not _is_ids(self.prompt)
            else [self.prompt]
        )
        if not 1 <= len(found) * self.n <= MOST_ANSWERS:
            what = f"{len(found)} prompts with n={self.n} ask for {len(found) * self.n} answers"
            raise RequestOptionError("n", what, f"1 to {MOST_ANSWERS}")
        return list(found)

    def num_tokens(self, room: int) -> int:
        """Most tokens of an answer."""
        del room
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: StrictInt | None = None

    def num_tokens(self, room: int) -> int:
        """Most tokens of an answer: what the context has room for unless said. OptionError."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            what = "max_tokens and max_completion_tokens are the same"
            raise RequestOptionError("max_tokens", what, "leave out one")
        for said in (self.max_completion_tokens, self.max_tokens):
            if said is not None:
                return said
        return max(1, room)


def _is_ids(prompt: list[Any]) -> bool:
    """Whether a list is one prompt of ids; an empty list is one, too."""
    return all(isinstance(item, int) for item in prompt)


def _same(value: Any, neutral: Any) -> bool:
    """Equal, where 0 is not false."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
