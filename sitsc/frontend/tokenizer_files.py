"""Tokenizer, chat template and special tokens of a Hugging Face folder.

In: the folder and its two configs. Out: `TokenizerFiles`; a folder without a tokenizer is fine.
Never runs a template or code of the checkpoint.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sitsc.core.errors import CheckpointError
from sitsc.frontend.checkpoint_types import TokenizerFiles
from sitsc.frontend.safe_files import read_bytes, read_json_object, read_text, shown

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def read_tokenizer_files(
    root: Path, config: dict[str, Any], generation_config: dict[str, Any]
) -> TokenizerFiles:
    """Whatever the folder has; CheckpointError for a file that is there but cannot be used."""
    settings = _optional_json(root, "tokenizer_config.json")
    named = _optional_json(root, "special_tokens_map.json") | settings
    special = {key: text for key in SPECIAL_TOKENS if (text := _token_text(named.get(key), key))}
    data = read_bytes(root, "tokenizer.json") if _exists(root, "tokenizer.json") else None
    tokenizer = load_tokenizer(data, "tokenizer.json") if data is not None else None
    bos_id = _token_id(tokenizer, special.get("bos_token"))
    if bos_id is None:
        bos_id = next(iter(_token_ids(config.get("bos_token_id"), "bos_token_id")), None)
    add_bos = _adds_bos(settings, tokenizer, bos_id)
    if data is not None and tokenizer is not None:
        data = with_bos(data, tokenizer, bos_id, add_bos)
    return TokenizerFiles(
        tokenizer_json=data,
        chat_template=_chat_template(root, settings),
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        bos_token_id=bos_id,
        add_bos=add_bos,
        eos_token_ids=_eos_ids(config, generation_config, tokenizer, special.get("eos_token")),
        special_tokens=special,
    )


def load_tokenizer(data: bytes, where: str) -> Tokenizer:
    """A `tokenizers.Tokenizer`; CheckpointError when `data` is not a usable tokenizer.json."""
    _check_document(data, where)  # the library is less strict than what reads the file later
    try:
        return Tokenizer.from_str(data.decode())
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic inside the library derives from BaseException
        raise CheckpointError(
            f"{where} cannot be used: {shown(str(error))[1:-1]}",
            where=where,
            hint="fetch the tokenizer again",
        ) from error


def _check_document(data: bytes, where: str) -> None:
    """JSON of the shape that we read tokens from: model.vocab and added_tokens."""
    try:
        document = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not valid JSON: {shown(str(error))[1:-1]}",
            where=where,
            hint="fetch the tokenizer again",
        ) from error
    model = document.get("model") if isinstance(document, dict) else None
    added = document.get("added_tokens") or [] if isinstance(document, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        good = all(_is_id(i) for i in vocab.values())
    else:
        good = isinstance(vocab, list) and all(
            isinstance(e, list) and e and isinstance(e[0], str) for e in vocab
        )
    good = (
        good
        and isinstance(added, list)
        and all(
            isinstance(t, dict) and isinstance(t.get("content"), str) and _is_id(t.get("id"))
            for t in added
        )
    )
    if not good:
        raise CheckpointError(
            f"{where} is not laid out like a tokenizer: model.vocab, added_tokens",
            where=where,
            hint="fetch the tokenizer again",
        )


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _exists(root: Path, name: str) -> bool:
    path = root / name
    return path.exists() or path.is_symlink()


def _optional_json(root: Path, name: str) -> dict[str, Any]:
    return read_json_object(root, name) if _exists(root, name) else {}


def _token_text(value: Any, key: str) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    if text is None or isinstance(text, str):
        return text or None
    raise CheckpointError(f"{key} {shown(value)} is no text", where="tokenizer_config.json")


def _token_id(tokenizer: Tokenizer | None, token: str | None) -> int | None:
    return tokenizer.token_to_id(token) if tokenizer is not None and token is not None else None


def _token_ids(value: Any, where: str) -> list[int]:
    """The ids in a config's `eos_token_id`: absent, one id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise CheckpointError(f"{where} {shown(value)} is neither an id nor a list of ids")
    return ids


def _eos_ids(
    config: dict[str, Any],
    generation_config: dict[str, Any],
    tokenizer: Tokenizer | None,
    token: str | None,
) -> tuple[int, ...]:
    ids = set(_token_ids(config.get("eos_token_id"), "config.json: eos_token_id"))
    where = "generation_config.json: eos_token_id"
    ids |= set(_token_ids(generation_config.get("eos_token_id"), where))
    # A token that the tokenizer does not know can never be generated: it adds no id.
    own = _token_id(tokenizer, token)
    return tuple(sorted(ids | ({own} if own is not None else set())))


def _chat_template(root: Path, settings: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json: a text, or a list with a `default`.

    Models that also take images may keep it in chat_template.json alone.
    """
    if _exists(root, "chat_template.jinja"):
        return read_text(root, "chat_template.jinja")
    value = settings.get("chat_template")
    if value is None:
        value = _optional_json(root, "chat_template.json").get("chat_template")
    if isinstance(value, list):
        named = {e.get("name"): e.get("template") for e in value if isinstance(e, dict)}
        value = named.get("default")
    if value is None or isinstance(value, str):
        return value
    raise CheckpointError(
        "chat_template is neither a text nor a list with a default", where="tokenizer_config.json"
    )


def _adds_bos(settings: dict[str, Any], tokenizer: Tokenizer | None, bos_id: int | None) -> bool:
    """`add_bos_token` where given, else whether the tokenizer's own post-processor adds it."""
    given = settings.get("add_bos_token")
    if isinstance(given, bool):
        return given and bos_id is not None
    if tokenizer is None or bos_id is None:
        return False
    return _puts_first(tokenizer, bos_id)


def _puts_first(tokenizer: Tokenizer, token_id: int | None) -> bool:
    return tokenizer.encode("").ids[:1] == [token_id]


def with_bos(data: bytes, tokenizer: Tokenizer, bos_id: int | None, add: bool) -> bytes:
    """`data`, its post-processor replaced if it does not put BOS before a text as `add` says.

    An explicit `add_bos_token` overrules tokenizer.json, as it does in transformers 5.
    """
    if bos_id is None or _puts_first(tokenizer, bos_id) == add:
        return data
    token = tokenizer.id_to_token(bos_id) if add else None
    if add and token is None:
        raise CheckpointError(f"BOS is id {bos_id}, which the tokenizer does not have")
    document = json.loads(data)
    document["post_processor"] = _bos_template(token, bos_id) if token is not None else None
    return json.dumps(document, ensure_ascii=False).encode()


def _bos_template(token: str, token_id: int) -> dict[str, Any]:
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, second],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }
