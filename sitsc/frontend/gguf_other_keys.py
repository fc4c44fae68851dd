"""GGUF metadata that is not the architecture's own: what it names the file, its parts, its tokens.

In: the metadata of the header. Out: the keys that nobody knows, so that the config check refuses
them; a file that is no whole model is refused here. The lists follow the GGUF specification and
what the public converter and quantiser write.
"""

import re
from typing import Any

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.safe_files import shown

_ABOUT = ("name", "author", "version", "organization", "description", "url", "doi", "uuid") + (
    "repo_url",
)
# Where the model comes from and how the file was made; `general.architecture`, `type` and
# `alignment` are read elsewhere.
_GENERAL = {f"general.{key}" for key in _ABOUT}
_GENERAL |= {
    f"general.{key}"
    for key in ("architecture", "type", "alignment", "file_type", "quantization_version")
    + ("finetune", "basename", "size_label", "quantized_by", "license", "license.name")
    + ("license.link", "tags", "languages", "datasets", "base_model.count", "dataset.count")
}
# Defaults of sampling and the data of a quantiser: nothing that is compiled depends on them.
_PATTERNS = re.compile(
    r"general\.(base_model|dataset)\.[0-9]{1,6}\.(" + "|".join(_ABOUT) + r")"
    r"|general\.source\.(url|doi|uuid|repo_url|huggingface\.repository)"
    r"|general\.sampling\.[a-z_]{1,40}"
    r"|quantize\.imatrix\.(file|dataset|entries_count|chunks_count)"
    r"|split\.(no|count|tensors\.count)"
    r"|tokenizer\.chat_template\.[A-Za-z0-9_-]{1,64}"
    r"|tokenizer\.ggml\.(bos|eos|eot|eom|unknown|seperator|padding|cls|mask|prefix|suffix|middle"
    r"|fim_pre|fim_suf|fim_mid|fim_pad|fim_rep|fim_sep)_token_id"
)
_TOKENIZER = {
    "tokenizer.chat_template",
    "tokenizer.chat_templates",
    "tokenizer.huggingface.json",
} | {
    f"tokenizer.ggml.{key}"
    for key in ("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges")
    + ("add_bos_token", "add_space_prefix", "remove_extra_whitespaces")
}
# Of no effect at these values alone.
_ONLY = {"tokenizer.ggml.add_eos_token": False, "tokenizer.ggml.add_sep_token": False}


def other_keys(metadata: dict[str, Any], arch: str) -> dict[str, Any]:
    """Keys outside of the architecture that nobody knows. Raises UnsupportedModelError."""
    kind, parts = metadata.get("general.type", "model"), metadata.get("split.count", 1)
    if kind != "model":
        raise UnsupportedModelError(f"the file is no model but {shown(kind)}", where="general.type")
    if parts not in (0, 1):
        raise UnsupportedModelError(
            f"the file is one of {shown(parts)} parts",
            where="split.count",
            hint="merge them into one file first",
        )
    known = _GENERAL | _TOKENIZER
    return {
        key: value
        for key, value in metadata.items()
        if not (key.startswith(f"{arch}.") or key in known or _PATTERNS.fullmatch(key))
        and not (key in _ONLY and value is _ONLY[key])
    }


def check_vocabulary(metadata: dict[str, Any], arch: str, rows: int) -> None:
    """Raises CheckpointError when the file calls for another vocabulary than its embedding has."""
    given = metadata.get(f"{arch}.vocab_size", rows)
    if type(given) is not int or given != rows:
        raise CheckpointError(
            f"{arch}.vocab_size is {shown(given)}, but the embedding has {rows} rows",
            hint="the file is damaged or was put together from two models",
        )
