"""Chat messages to the text a model was trained on, by the model's own Jinja template.

Templates are untrusted: they run in Jinja's immutable sandbox and see plain data only. The text
holds its own special tokens: encode it with `add_bos=False`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from sitsc.core.errors import RequestError, TokenizerError

_WRITTEN_OUT = "{'type'"
_PARTS = 'give content as a text, or parts {"type": "text", "text": …}'


class _Generation(Extension):
    """The tag {% generation %}, which marks answers for training: only its body matters here."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the tag by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """The template's namespace(), without names that Python gives a meaning of its own."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _namespace(**values: Any) -> _PlainNamespace:
    space = _PlainNamespace()
    for name, value in values.items():
        space[name] = value
    return space


class ChatTemplate:
    """One template with the special tokens it may name. `TokenizerError` if it does not parse.

    `now` is the clock that `strftime_now` reads; pass a fixed one for text that can be repeated.
    """

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["namespace"] = _namespace
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = environment.from_string(template)
        except TemplateError as error:
            raise TokenizerError(
                f"the chat template cannot be parsed: {error}",
                hint="plain completion works without a template",
            ) from error

    @classmethod
    def from_config(
        cls, tokenizer_config: Mapping[str, Any], template: str | None = None
    ) -> "ChatTemplate":
        """The template of a tokenizer_config.json, or `template` (chat_template.jinja) over it.

        Of a list of named templates "default" is taken. Raises `TokenizerError` if there is none.
        """
        found: Any = template if template is not None else tokenizer_config.get("chat_template")
        if isinstance(found, list):
            found = {entry["name"]: entry["template"] for entry in found}
        if isinstance(found, dict):
            found = found.get("default")
        if not isinstance(found, str):
            raise TokenizerError(
                "the model has no chat template",
                hint="plain completion works: leave out --chat, or add chat_template.jinja",
            )
        return cls(found, special_token_names(tokenizer_config))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text. Raises `RequestError` when the template refuses the messages.

        A content is a text or a list of parts {"type": "text", "text": …}; others are refused.
        Templates read texts, or lists only, as those of models that also take images: they get
        what they read.
        """
        _check_parts(messages)
        values = {**self._special_tokens, **variables, "documents": None, "tools": tools}
        values["add_generation_prompt"] = add_generation_prompt
        asis = self._rendered([dict(m) for m in messages], values)
        if isinstance(asis, str) and _holds(asis, messages):
            return asis
        for form in (_listed, _joined):
            text = self._rendered([form(m) for m in messages], values)
            if isinstance(text, str) and _holds(text, messages):
                return text
        if isinstance(asis, str):  # a template may shorten messages
            return asis
        raise RequestError(
            f"the chat template refuses these messages: {asis}",
            hint="check the roles and their order",
        ) from asis

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> str | Exception:
        """The text, or why there is none: a template is foreign code and may raise anything."""
        try:
            return self._template.render(messages=messages, **values)
        except Exception as error:
            return error


def _listed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as a list of parts."""
    content = message.get("content")
    parts = [{"type": "text", "text": content}]
    return {**message, "content": parts} if isinstance(content, str) else dict(message)


def _joined(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with its content as one text."""
    content = message.get("content")
    return {**message, "content": _text(content)} if isinstance(content, list) else dict(message)


def _text(content: Any) -> str:
    """What a content says: a text, or the texts of its parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError for an image, a sound or the like: an artifact computes text alone."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind == "text" and not isinstance(part.get("text"), str):
                raise RequestError("a part of type 'text' has no text", hint=_PARTS)
            if kind != "text":
                raise RequestError(
                    f"a message holds {kind!r}: this model was compiled for text alone",
                    hint=_PARTS,
                )


def _holds(text: str, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is in the prompt; templates may shorten those before.

    A list that is written out as it is holds the text, too.
    """
    said = _text(messages[-1].get("content")) if messages else ""
    return said.strip() in text and (_WRITTEN_OUT not in text or _WRITTEN_OUT in said)


def special_token_names(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name ("bos_token" → "<s>") from a tokenizer_config.json."""
    names: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str):
                names[name] = text
    return names


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the templates expect it: not escaped for HTML, unlike Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
