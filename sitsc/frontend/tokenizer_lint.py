"""A tokenizer and the special ids of the configs against the width of the logits.

In: a checkpoint. Out: errors (a token the model has no row for) and warnings (a token nobody has).
Never encodes text.
"""

import json
from collections.abc import Iterator
from typing import Any

from sitsc.core.errors import ConfigError, SitscError
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.safe_files import shown

ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def token_ids(tokenizer_json: bytes) -> dict[str, int]:
    """Every token of a tokenizer.json, with its id; unusable entries are left out."""
    document: Any = json.loads(tokenizer_json)
    vocab: Any = document.get("model", {}).get("vocab", {})
    if isinstance(vocab, dict):
        found = {str(token): i for token, i in vocab.items() if type(i) is int}
    else:  # Unigram: a list of [token, score]
        found = {str(entry[0]): i for i, entry in enumerate(vocab)}
    for token in document.get("added_tokens") or ():
        found[str(token["content"])] = int(token["id"])
    return found


def tokenizer_problems(checkpoint: Checkpoint) -> tuple[list[SitscError], list[str]]:
    """(errors, warnings) about tokens and ids."""
    width, files = int(checkpoint.config["vocab_size"]), checkpoint.tokenizer
    errors, warnings = [], list(_id_warnings(checkpoint, width))
    if files.tokenizer_json is None:
        return errors, warnings
    tokens = token_ids(files.tokenizer_json)
    beyond = sorted((i, token) for token, i in tokens.items() if i >= width)
    if beyond:
        number, token = beyond[0]
        errors.append(
            ConfigError(
                f"the tokenizer has {len(beyond)} tokens beyond the model's {width} rows, first "
                f"{shown(token)} = {number}",
                where="tokenizer.json",
                hint="tokenizer and weights are of different models, or the embedding was not "
                "resized when tokens were added",
            )
        )
    if files.add_bos and files.bos_token_id is not None and files.bos_token_id >= width:
        errors.append(
            ConfigError(
                f"BOS is id {files.bos_token_id}, the model has {width} rows",
                where="tokenizer_config.json",
                hint="set add_bos_token to false or fetch the matching tokenizer",
            )
        )
    warnings += [
        f"{key} {shown(text)} is not a token of tokenizer.json"
        for key, text in sorted(files.special_tokens.items())
        if text not in tokens
    ]
    if files.eos_token_ids and min(files.eos_token_ids) >= width:
        errors.append(
            ConfigError(
                f"every EOS id ({', '.join(map(str, files.eos_token_ids))}) is beyond the model's "
                f"{width} rows: nothing would ever end",
                where="config.json",
                hint="correct eos_token_id in config.json or generation_config.json",
            )
        )
    if not files.eos_token_ids:
        warnings.append("no EOS token is known: generation ends at the length limit only")
    return errors, warnings


def _id_warnings(checkpoint: Checkpoint, width: int) -> Iterator[str]:
    """Ids of the two configs that name no row."""
    both = (checkpoint.config, checkpoint.generation_config)
    for where, config in zip(("config.json", "generation_config.json"), both, strict=True):
        for key in ID_KEYS:
            value = config.get(key)
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not (type(number) is int and 0 <= number < width):
                    yield f"{key} {shown(number)} in {where} is outside the {width} rows"
