"""A tokenizer.json from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

In: the metadata. Out: bytes of a tokenizer.json that the `tokenizers` library has accepted. An
unknown pre-tokenizer is refused by name: guessing would tokenize wrongly without a word.
"""

import json
from typing import Any

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.safe_files import shown
from sitsc.frontend.tokenizer_files import load_tokenizer, with_bos

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
MAX_PIECE_CHARS = 2048
LLAMA3_PRE = ("llama-bpe", "llama3")
GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _splits(*patterns: str) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False}
        for p in patterns
    ]
    return {"type": "Sequence", "pretokenizers": [*parts, _byte_level(use_regex=False)]}


def _pre_tokenizers() -> dict[str, dict[str, Any]]:
    digits = {"type": "Digits", "individual_digits": True}
    default = (r"[\p{P}\$\+<=>\^~\|]+", GPT2_REGEX, r"\p{N}+", r"[0-9][0-9][0-9]")
    return {
        "smollm": {"type": "Sequence", "pretokenizers": [digits, _byte_level(use_regex=True)]},
        "llama-bpe": _splits(LLAMA3_REGEX),
        "llama3": _splits(LLAMA3_REGEX),
        "qwen2": _splits(QWEN2_REGEX),
        "gpt-2": _byte_level(use_regex=True),
        "default": _splits(*default),
    }


def build_tokenizer_json(metadata: dict[str, Any], bos_id: int | None, add_bos: bool) -> bytes:
    """tokenizer.json for `tokenizer.ggml.*`, which puts `bos_id` before a text if `add_bos`.

    UnsupportedModelError for unknown kinds by name, CheckpointError for lists that do not fit.
    """
    tokens, types = token_list(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        parts = _sentencepiece_bpe(metadata, tokens)
    else:
        raise UnsupportedModelError(
            f"tokenizer.ggml.model {shown(kind)} is not supported", hint="supported: gpt2, llama"
        )
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, tokens[i], kind_of)
            for i, kind_of in enumerate(types)
            if kind_of in (CONTROL, USER_DEFINED) or (kind == "llama" and kind_of == UNKNOWN)
        ],
        "post_processor": None,
        **parts,
    }
    data = json.dumps(document, ensure_ascii=False).encode()
    return with_bos(data, load_tokenizer(data, "the GGUF tokenizer"), bos_id, add_bos)


def token_list(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens; CheckpointError if they are not two lists of one length."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise CheckpointError("tokenizer.ggml.tokens is not a list of texts")
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError("tokenizer.ggml.token_type does not match the tokens")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens holds a token twice")
    return tokens, types


def _added_token(token_id: int, content: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": kind != USER_DEFINED}


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre, known = metadata.get("tokenizer.ggml.pre"), _pre_tokenizers()
    if not isinstance(pre, str) or pre not in known:
        raise UnsupportedModelError(
            f"pre-tokenizer {shown(pre)} (tokenizer.ggml.pre) is not supported",
            hint=f"supported: {', '.join(known)}",
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(m, str) for m in merges):
        raise CheckpointError("tokenizer.ggml.merges is not a list of texts")
    pairs = [m.split(" ") for m in merges]
    if any(len(p) != 2 for p in pairs):
        raise CheckpointError("tokenizer.ggml.merges holds an entry that is not a pair")
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": known[pre],
        "decoder": _byte_level(use_regex=True) | {"add_prefix_space": True},
        "model": _bpe(tokens, pairs, ignore_merges=pre in LLAMA3_PRE),
    }


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    defaults = {
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    vocab = {token: i for i, token in enumerate(tokens)}
    return {"type": "BPE", **defaults, **options, "vocab": vocab, "merges": merges}


def _sentencepiece_bpe(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    """Merges follow the scores: the pair whose joined piece has the highest score goes first."""
    scores: Any = metadata.get("tokenizer.ggml.scores")
    numbers = isinstance(scores, list) and all(type(s) is float for s in scores)
    if not numbers or len(scores) != len(tokens):
        raise CheckpointError("tokenizer.ggml.scores does not match the tokens")
    if any(len(t) > MAX_PIECE_CHARS for t in tokens):
        raise CheckpointError(f"a token is longer than {MAX_PIECE_CHARS} characters")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizers = [{"type": "Prepend", "prepend": "▁"}, space] if prefix else [space]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            tokens,
            _merges_by_score(tokens, scores),
            unk_token=tokens[0 if unknown is None else unknown],
            fuse_unk=True,
            byte_fallback=True,
        ),
    }


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[list[str]]:
    ids = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, int]] = []
    for i, token in enumerate(tokens):
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[i], i, left, right))
    return [[tokens[left], tokens[right]] for _, _, left, right in sorted(found)]
