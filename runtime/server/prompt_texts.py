"""Prompts of requests as token ids, on the HTTP side: chat template, tokenizer, what fits.

In: text, ids or messages. Out: ids. Reads the artifact's files; the engine's process has compared
their checksums before it is ready.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sitsc.core.errors import RequestError
from sitsc.core.serving.request import check_length, check_vocabulary
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
        check_vocabulary(ids, self.vocab_size)
        check_length(len(ids), self.context_tokens)
        return ids

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of messages in the model's template. Raises RequestError, CapacityError."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template", hint="use /v1/completions with the whole prompt"
            )
        return self.ids(self.template.render(messages), add_bos=False)
