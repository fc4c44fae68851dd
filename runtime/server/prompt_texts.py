"""Prompts of requests as token ids, on the HTTP side: chat template, tokenizer, what fits.

In: text, ids or messages. Out: ids. Reads the artifact's files; the engine's process has compared
their checksums before it is ready.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sitsc.core.errors import CapacityError, RequestError
from sitsc.runtime.chat import ChatTemplate
from sitsc.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptTexts:
    """`context_tokens` is the room of prompt and answer; ids run below `vocab_size`."""

    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    context_tokens: int
    vocab_size: int

    @classmethod
    def open(cls, hello: Mapping[str, Any]) -> "PromptTexts":
        """From the files that the engine's process names. Raises TokenizerError."""
        tokenizer = template = None
        if hello["tokenizer"]:
            tokenizer = Tokenizer.from_file(Path(hello["tokenizer"]))
        if hello["template"]:
            special = json.loads(Path(hello["special"]).read_text(encoding="utf-8"))
            template = ChatTemplate(Path(hello["template"]).read_text(encoding="utf-8"), special)
        return cls(tokenizer, template, hello["context_tokens"], hello["vocab_size"])

    def ids(self, prompt: str | Sequence[int], add_bos: bool = True) -> list[int]:
        """The ids of a prompt. Raises RequestError, CapacityError."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer", hint="give ids, not text")
            ids = self.tokenizer.encode(prompt, add_bos)
        else:
            ids = list(prompt)
        if not ids:
            raise RequestError("the prompt is empty", hint="give at least one token")
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise RequestError(
                f"token ids {min(ids)} to {max(ids)} are not all in the vocabulary",
                hint=f"ids run from 0 to {self.vocab_size - 1}",
            )
        if len(ids) >= self.context_tokens:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context_tokens} with at"
                " least one of the answer",
                hint=f"shorten it to at most {self.context_tokens - 1} tokens",
            )
        return ids

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of messages in the model's template. Raises RequestError, CapacityError."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template", hint="use /v1/completions with the whole prompt"
            )
        return self.ids(self.template.render(messages), add_bos=False)
