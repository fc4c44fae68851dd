"""Encoding, decoding, and pieces that joined are the whole, for every kind of tokenizer."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from sitsc.core.errors import RequestError, TokenizerError
from sitsc.runtime.tokenizer import ByteDetokenizer, Tokenizer, WindowDetokenizer
from tests.runtime.tokenizers_for_tests import WORDS, all_kinds, byte_level

BACKENDS = all_kinds()
OURS = {name: Tokenizer(made.to_str().encode()) for name, made in BACKENDS.items()}


def pieces(detokenizer, ids: list[int]) -> list[str]:
    return [detokenizer.push(i) for i in ids] + [detokenizer.flush()]


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_whole(name: str, data: st.DataObject) -> None:
    """Any ids, among them broken characters, runs of raw bytes and special tokens."""
    ours = OURS[name]
    any_id = st.integers(0, ours.vocab_size - 1) | st.integers(ours.vocab_size - 20, 10**6)
    ids = data.draw(st.lists(any_id, max_size=25))
    skip = data.draw(st.booleans())
    whole = ours.decode(ids, skip)
    assert "".join(pieces(ours.detokenizer(skip), ids)) == whole
    assert "".join(pieces(WindowDetokenizer(ours, skip), ids)) == whole


@given(st.text())
def test_byte_level_goes_both_ways(text: str) -> None:
    ours = OURS["byte_level"]
    ids = ours.encode(text, add_bos=False)
    out = pieces(ours.detokenizer(skip_special=False), ids)
    assert "".join(out) == text
    assert ours.encode(text)[0] == 0 and ours.encode(text)[1:] == ids
    assert ids == BACKENDS["byte_level"].encode(text, add_special_tokens=False).ids


def test_never_half_a_character_and_no_waiting() -> None:
    ours = OURS["byte_level"]
    ids = ours.encode("🦊 hello", add_bos=False)
    out = pieces(ours.detokenizer(), ids)
    assert isinstance(ours.detokenizer(), ByteDetokenizer)
    fox = out.index("🦊")
    assert fox > 0 and not any(out[:fox])  # its bytes came before, and showed nothing
    assert out[-1] == ""  # nothing was held at the end
    assert pieces(ours.detokenizer(), ids[:2])[-1] == "\ufffd"


def test_text_comes_with_its_token() -> None:
    ours = OURS["llama2"]
    ids = [i for i in map(ours.id_of, ["▁hello", "▁wor", "ld", "▁", "é"]) if i is not None]
    assert pieces(ours.detokenizer(), ids) == ["hello", " wor", "ld", " ", "é", ""]


def test_special_tokens_are_left_out_by_default() -> None:
    ours = OURS["byte_level"]
    ids = ours.encode("<|im_start|>hello<|im_end|>")
    assert ours.decode(ids) == "hello"
    assert "".join(pieces(ours.detokenizer(), ids)) == "hello"
    shown = "<bos><|im_start|>hello<|im_end|>"
    assert "".join(pieces(ours.detokenizer(skip_special=False), ids)) == shown
    assert ours.special_ids == {0, 1, 2, 3}


@pytest.mark.parametrize("name", BACKENDS)
def test_equal_to_transformers(name: str) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=Backend.from_str(BACKENDS[name].to_str()))
    ours = OURS[name]
    assert ours.encode(WORDS) == theirs(WORDS)["input_ids"]
    assert ours.encode(WORDS, add_bos=False) == theirs.encode(WORDS, add_special_tokens=False)
    ids = ours.encode(WORDS)
    assert ours.decode(ids) == theirs.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("add_bos", [True, False])
def test_long_texts_have_the_ids_of_the_backend(name: str, add_bos: bool) -> None:
    """They are read in another way."""
    text, backend = "Hello wörld, 123 \U0001f600 " * 400, Backend.from_str(BACKENDS[name].to_str())
    assert OURS[name].encode(text, add_bos) == backend.encode(text, add_special_tokens=add_bos).ids
    with pytest.raises(RequestError):
        OURS[name].encode(text + "\ud800")


def test_padding_and_truncation_of_the_file_are_ignored() -> None:
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=50)
    assert Tokenizer(made.to_str().encode()).encode(WORDS) == OURS["byte_level"].encode(WORDS)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_not_a_tokenizer(content: bytes) -> None:
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer(content)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer.*tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_lone_surrogate_is_the_requests_mistake() -> None:
    with pytest.raises(RequestError, match="cannot be encoded"):
        OURS["byte_level"].encode("a\udce4")
