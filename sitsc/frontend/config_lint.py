"""Every key of config.json is consumed, known to be inert, or an error; values are checked too.

In: a config dict. Out: nothing, or ConfigError / UnsupportedModelError naming key, value and what
to do. The knowledge is data: sitsc/data/config_keys.toml. Tensors are checked in tensor_lint.py.
"""

from collections.abc import Mapping
from typing import Any

from sitsc.core.errors import UnsupportedModelError
from sitsc.frontend.checkpoint_types import TensorInfo
from sitsc.frontend.config_knowledge import bad_value, is_positive, knowledge, refuse_unknown
from sitsc.frontend.rope_lint import check_rope
from sitsc.frontend.safe_files import shown
from sitsc.frontend.tensor_lint import Family, TensorLint, lint_family_tensors

COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers") + (
    "num_attention_heads",
    "max_position_embeddings",
)
OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim", "num_experts", "num_local_experts") + (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "shared_expert_intermediate_size",
)
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")


def supported_models() -> tuple[str, ...]:
    """The `model_type`s that can be compiled."""
    return tuple(knowledge()["families"])


def lint_config(config: dict[str, Any], allow: frozenset[str] = frozenset()) -> None:
    """Check all keys and the values that matter; `allow` names unknown keys to let pass.

    ConfigError names the key, its value and `--allow-unknown-key KEY`; UnsupportedModelError
    lists the supported models.
    """
    family = _family(config)
    consumed = {*knowledge()["common"]["consumed"], *family["consumed"]}
    only = knowledge()["common"]["only"] | family.get("only", {})
    for key, value in config.items():
        if key in only and key not in consumed:
            _check_only(key, value, only[key])
        elif key not in consumed and key not in knowledge()["common"]["inert"]:
            refuse_unknown(key, value, allow)
    _check_numbers(config)
    _check_heads(config, family)
    _check_activation(config)
    _check_layer_types(config)
    check_rope(config, allow)


def lint_tensors(config: dict[str, Any], tensors: Mapping[str, TensorInfo]) -> TensorLint:
    """Compare tensors with what the config calls for.

    ConfigError for a missing, unexpected or misshapen tensor; the result names those that are left
    out on purpose. The config must have passed `lint_config`.
    """
    family = _family(config)
    shape = Family(
        tied=family.get("tied", False),
        qkv_bias=family.get("qkv_bias", False),
        qk_norm=family.get("qk_norm", ""),
        fused=family.get("fused", False),
        head_dim=family.get("head_dim", 0),
        experts=family.get("experts", "qwen"),
        attention_bias=family.get("attention_bias", False),
        sinks=family.get("sinks", False),
        norms=tuple(family.get("norms", ("input_layernorm", "post_attention_layernorm"))),
    )
    return lint_family_tensors(config, shape, tensors)


def _family(config: dict[str, Any]) -> dict[str, Any]:
    kind, families = config.get("model_type"), knowledge()["families"]
    if not isinstance(kind, str) or kind not in families:
        raise UnsupportedModelError(
            f"model_type {shown(kind)} is not supported", hint=f"supported: {', '.join(families)}"
        )
    family, names = families[kind], config.get("architectures")
    if names is not None and names != [family["architecture"]]:
        raise UnsupportedModelError(
            f"architectures is {shown(names)}", hint=f"supported: {family['architecture']}"
        )
    return family


def _check_only(key: str, value: Any, allowed: list[Any]) -> None:
    good = value is None or any(value == a and type(value) is type(a) for a in allowed)
    if not good:
        raise bad_value(key, value, f"only {' or '.join(map(repr, allowed))} is supported")


def _check_numbers(config: dict[str, Any]) -> None:
    for key in COUNTS:
        if not _is_count(config.get(key)):
            raise bad_value(key, config.get(key), "a positive whole number is needed")
    for key in OPTIONAL_COUNTS:
        if config.get(key) is not None and not _is_count(config[key]):
            raise bad_value(key, config[key], "a positive whole number is needed")
    for key in FLAGS:
        if config.get(key) is not None and type(config[key]) is not bool:
            raise bad_value(key, config[key], "true or false is needed")
    dense = config.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(i) is int for i in dense)):
        raise bad_value("mlp_only_layers", dense, "a list of layer numbers is needed")
    if "rms_norm_eps" in config and not is_positive(config["rms_norm_eps"]):
        raise bad_value("rms_norm_eps", config["rms_norm_eps"], "a positive number is needed")


def _check_heads(config: dict[str, Any], family: dict[str, Any]) -> None:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is None and not family.get("default_kv_heads", True):
        raise bad_value("num_key_value_heads", None, "this family has no safe default")
    if heads % (kv_heads or heads):
        raise bad_value("num_key_value_heads", kv_heads, f"it must divide the {heads} query heads")
    own = config.get("head_dim") or family.get("head_dim")
    if own is None and config["hidden_size"] % heads:
        raise bad_value("hidden_size", config["hidden_size"], f"{heads} heads do not divide it")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _check_activation(config: dict[str, Any]) -> None:
    known = knowledge()["activations"]["known"]
    for key in ("hidden_act", "hidden_activation"):
        value = config.get(key)
        if value is not None and value not in known:
            raise bad_value(key, value, f"known: {', '.join(known)}")


def _check_layer_types(config: dict[str, Any]) -> None:
    types, known = config.get("layer_types"), knowledge()["common"]["layer_types"]
    if types is None:
        return
    if not isinstance(types, list) or any(t not in known for t in types):
        raise bad_value("layer_types", types, f"known: {', '.join(known)}")
    if len(types) != config["num_hidden_layers"]:
        raise bad_value(
            "layer_types", types, f"one for each of {config['num_hidden_layers']} layers"
        )
