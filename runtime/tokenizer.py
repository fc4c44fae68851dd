"""Text to ids and back, from the bytes of a tokenizer.json. Knows nothing of models.

The incremental detokenizers emit text as soon as no later token can change it; their pieces
joined are the decoding of the whole.
"""

import codecs
import json
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as _Backend

from sitsc.core.errors import RequestError, TokenizerError

_LONG_CHARS = 4096


class Detokenizer(Protocol):
    """Turns ids that come one by one into text that never has to be taken back."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, often "" or one word."""
        ...

    def flush(self) -> str:
        """The rest, when no token follows; half a character becomes U+FFFD."""
        ...


class Tokenizer:
    """Encodes and decodes with the rules of one tokenizer.json.

    Raises `TokenizerError` if the bytes are not a tokenizer.
    """

    def __init__(self, tokenizer_json: bytes, *, where: str = "tokenizer.json") -> None:
        try:
            self._backend = _Backend.from_str(tokenizer_json.decode())
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(
                f"the tokenizer cannot be read: {error}",
                where=where,
                hint="give a tokenizer.json of the tokenizers library",
            ) from error
        self._backend.no_padding()
        self._backend.no_truncation()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a file; `TokenizerError` if it is missing."""
        try:
            return cls(path.read_bytes(), where=str(path))
        except OSError as error:
            raise TokenizerError(
                "there is no tokenizer", where=str(path), hint="give token ids, or add the file"
            ) from error

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of tokens that stand for one raw byte and are spelled <0x0A>."""
        ids = (self.id_of(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(i for i in ids if i is not None)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a text. `add_bos` adds what the tokenizer itself puts around a text.

        Other threads of Python go on while a long text is read: only batches let them.
        Raises `RequestError` if the text is not Unicode (a lone surrogate).
        """
        try:
            if len(text) <= _LONG_CHARS:
                return self._backend.encode(text, add_special_tokens=add_bos).ids
            (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_bos)
            return found.ids
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"the text cannot be encoded: {error}", hint="use UTF-8") from error

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that form no character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        """Id of one token's exact spelling, such as "<|im_end|>"."""
        return self._backend.token_to_id(token)

    def has_id(self, token_id: int) -> bool:
        """Whether a token has this id; decoding leaves out ids without a token."""
        return self._backend.id_to_token(token_id) is not None

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        """A fresh incremental detokenizer for one answer."""
        if self._is_byte_level:
            return ByteDetokenizer(self, skip_special)
        return WindowDetokenizer(self, skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; b"" if there is no such id."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = _spelled(self._backend.id_to_token(token_id))
        return found

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether decoding is nothing but joining the tokens' bytes."""
        decoder: Any = self._backend.decoder
        if decoder is None:
            return False
        steps = json.loads(decoder.__getstate__())
        return [step["type"] for step in steps.get("decoders", [steps])] == ["ByteLevel"]


class ByteDetokenizer:
    """For byte-level vocabularies: joins bytes, holds at most three of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if token_id in self._skip:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """The rest, when no token follows."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any vocabulary: decodes a window that begins with the tokens of the last piece.

    A decoder may need the tokens before to place a space, and a run of byte tokens is decoded
    together, so nothing is emitted inside of a run.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._window: list[int] = []  # ids of the last emitted piece, then ids not emitted yet
        self._num_emitted = 0  # leading ids of the window whose text is out
        self._emitted = ""  # decoding of those

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if token_id in self._skip or not self._tokenizer.has_id(token_id):
            return ""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            return ""
        return self._emit(final=False)

    def flush(self) -> str:
        """The rest, when no token follows."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        text = self._tokenizer.decode(self._window, skip_special=False)
        if text.endswith("\ufffd") and not final:
            return ""  # the next byte may belong to the same character
        piece = text[len(self._emitted) :]
        if piece:
            del self._window[: self._num_emitted]
            self._num_emitted = len(self._window)
            self._emitted = self._tokenizer.decode(self._window, skip_special=False)
        return piece


@cache
def _alphabet() -> dict[str, int]:
    """Byte of each letter of byte-level spelling: printable Latin-1 stands for itself.

    The other bytes, in order, are spelled with the characters from 256 up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def _spelled(token: str | None) -> bytes:
    """Bytes of a token; one with a foreign letter (an added token) is plain text."""
    letters = _alphabet()
    values = [letters.get(letter) for letter in token or ""]
    known = [value for value in values if value is not None]
    return bytes(known) if len(known) == len(values) else (token or "").encode()
