import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.gguf_tokenizer import build_tokenizer_json
from tests.frontend.checkpoint_files import byte_alphabet, byte_level_metadata

PRES = ["smollm", "llama-bpe", "llama3", "qwen2", "gpt-2", "default"]
SPACE = "▁"


def build(metadata: dict[str, Any], bos: int | None = None, add: bool = False) -> Tokenizer:
    return Tokenizer.from_str(build_tokenizer_json(metadata, bos, add).decode())


def sentencepiece_metadata(**extra: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, 256 bytes, then pieces whose scores fall with their id."""
    pieces = [SPACE, *"helowrd", "he", "ll", "llo", "hello", SPACE + "hello", SPACE + "w", "or"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces) + 1)],
        "tokenizer.ggml.unknown_token_id": 0,
    } | extra


@pytest.mark.parametrize("pre", PRES)
@given(text=st.text())
def test_byte_level_round_trip(pre: str, text: str):
    tokenizer = build(byte_level_metadata(pre))
    expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == expected


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=SPACE)))
def test_sentencepiece_round_trip(text: str):
    tokenizer = build(sentencepiece_metadata())
    # The space put in front is taken away again; nothing else changes.
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_are_one_id_and_user_defined_ones_are_kept_in_text():
    tokenizer = build(byte_level_metadata())
    assert tokenizer.encode("<|im_start|>").ids == [1]
    assert tokenizer.encode("<|im_start|>hell<|im_end|>").ids == [1, 261, 2]
    assert tokenizer.decode([1, 261, 2]) == "hell"
    spm = build(sentencepiece_metadata())
    tool = spm.token_to_id("<tool>")
    assert tool in spm.encode("x<tool>y").ids
    assert spm.decode([tool]) == "<tool>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a 123 b's", ["a", "Ġ", "1", "2", "3", "Ġb", "'s"]),
        ("gpt-2", "a 123 b's", ["a", "Ġ123", "Ġb", "'s"]),
        ("llama-bpe", "a 12345 B'S", ["a", "Ġ", "123", "45", "ĠB", "'S"]),
        ("qwen2", "a 12", ["a", "Ġ", "1", "2"]),
        ("default", "a 12345+b", ["a", "Ġ", "123", "45", "+", "b"]),
    ],
)
def test_pre_tokenizers_split_as_their_rule_says(pre: str, text: str, pieces: list[str]):
    found = build(byte_level_metadata(pre)).pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in found] == pieces


def test_llama3_takes_a_whole_word_from_the_vocabulary_before_merging():
    metadata = byte_level_metadata("llama-bpe")
    metadata["tokenizer.ggml.merges"] = ["h e"]
    assert build(metadata).encode("hell").ids == [261]


def test_sentencepiece_merges_the_best_score_first():
    tokenizer = build(sentencepiece_metadata())
    assert tokenizer.encode("hello world").tokens == [SPACE + "hello", SPACE + "w", "or", "l", "d"]
    assert tokenizer.encode("é").tokens == [SPACE, "<0xC3>", "<0xA9>"]


def test_without_a_space_prefix_nothing_is_put_in_front():
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = build(metadata)
    assert tokenizer.encode("hello").tokens == ["hello"]
    assert tokenizer.decode(tokenizer.encode(" hello").ids) == " hello"


@pytest.mark.parametrize("add", [True, False])
def test_bos_is_put_in_front_when_asked(add: bool):
    for metadata in (sentencepiece_metadata(), byte_level_metadata()):
        ids = build(metadata, bos=1, add=add).encode("h").ids
        assert (ids[0] == 1) is add


def test_qwen2_composes_characters():
    tokenizer = build(byte_level_metadata("qwen2"))
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_the_same_metadata_gives_the_same_bytes():
    first, second = (build_tokenizer_json(byte_level_metadata(), 0, False) for _ in range(2))
    assert first == second and json.loads(first)["model"]["type"] == "BPE"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pre": "tekken"}, UnsupportedModelError, "'tekken'"),
        ({"pre": ["smollm"]}, UnsupportedModelError, "pre-tokenizer"),
        ({"model": "bert"}, UnsupportedModelError, "'bert'"),
        ({"tokens": []}, CheckpointError, "tokens is not a list"),
        ({"tokens": [1, 2]}, CheckpointError, "tokens is not a list"),
        ({"token_type": ["x"]}, CheckpointError, "does not match"),
        ({"merges": "he"}, CheckpointError, "merges is not a list"),
        ({"merges": ["h e l"]}, CheckpointError, "not a pair"),
        ({"merges": ["h €"]}, CheckpointError, "cannot be used"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(change, error, message):
    metadata = byte_level_metadata() | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(error, match=message):
        build(metadata)


@pytest.mark.parametrize("scores", [None, [1.0], ["x"] * 275])
def test_scores_that_do_not_fit_are_refused(scores):
    with pytest.raises(CheckpointError, match="scores does not match"):
        build(sentencepiece_metadata() | {"tokenizer.ggml.scores": scores})


def test_all_bytes_are_there():
    assert len(byte_alphabet()) == 256
