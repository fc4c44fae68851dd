"""Text to ids and back, from the bytes of a tokenizer.json. Knows nothing of models.

The incremental detokenizer emits text as soon as no later token can change it; its pieces joined
are the decoding of the whole.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Backend

from sitsc.core.errors import TokenizerError


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
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.byte_ids = frozenset(i for text, i in vocab.items() if _is_byte_token(text))

    @classmethod
    def from_file(cls, path: Path) -> "Tokenizer":
        """The tokenizer of a file; `TokenizerError` if it is missing."""
        try:
            return cls(path.read_bytes(), where=str(path))
        except OSError as error:
            raise TokenizerError(
                "there is no tokenizer", where=str(path), hint="give token ids, or add the file"
            ) from error

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Ids of a text. `add_bos` adds what the tokenizer itself puts around a text."""
        return self._backend.encode(text, add_special_tokens=add_bos).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that form no character become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int | None:
        """Id of one token's exact spelling, such as "<|im_end|>"."""
        return self._backend.token_to_id(token)


def _is_byte_token(text: str) -> bool:
    """Whether a token stands for one raw byte, spelled <0x0A>."""
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


class Detokenizer:
    """Turns ids that come one by one into text that never has to be taken back.

    Decodes a window that begins at the last emitted token but one run: a decoder may need the
    token before to place a space. Text is held while it ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._window: list[int] = []  # ids of the last emitted piece, then ids not emitted yet
        self._num_emitted = 0  # leading ids of the window whose text is out
        self._emitted = ""  # decoding of those

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, often "" or one word."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window, skip_special=False)
        if token_id in self._tokenizer.byte_ids or text.endswith("\ufffd"):
            return ""  # the next byte may belong to the same character
        return self._emit(text)

    def flush(self) -> str:
        """The rest, when no token follows; half a character becomes U+FFFD."""
        if len(self._window) == self._num_emitted:
            return ""
        return self._emit(self._tokenizer.decode(self._window, skip_special=False))

    def _emit(self, text: str) -> str:
        piece = text[len(self._emitted) :]
        if piece:
            del self._window[: self._num_emitted]
            self._num_emitted = len(self._window)
            self._emitted = self._tokenizer.decode(self._window, skip_special=False)
        return piece
