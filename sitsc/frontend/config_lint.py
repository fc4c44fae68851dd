"""Every key of config.json is consumed, known to be inert, or an error; values are checked too.

In: a config dict. Out: nothing, or ConfigError / UnsupportedModelError naming key, value and what
to do. The knowledge is data: sitsc/data/config_keys.toml. Tensors are checked in tensor_lint.py.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sitsc.core.errors import SitscError
from sitsc.frontend.checkpoint_types import Nested, TensorInfo
from sitsc.frontend.config_knowledge import (
    bad_value,
    canonical,
    check_key,
    family_of,
    is_positive,
    knowledge,
)
from sitsc.frontend.rope_lint import check_rope
from sitsc.frontend.tensor_lint import TensorLint, family_shapes, tensor_problems

COUNTS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers") + (
    "num_attention_heads",
    "max_position_embeddings",
)
OPTIONAL_COUNTS = ("num_key_value_heads", "head_dim", "num_experts", "num_local_experts") + (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "shared_expert_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window") + (
    "norm_topk_prob",
    "use_bias",
    "use_qk_norm",
    "use_parallel_residual",
    "use_qkv_bias",
    "qk_layernorm",
)
DTYPES = ("float32", "bfloat16", "float16")
POSITIVE = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon") + (
    "logit_scale",
    "logits_scaling",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "routed_scaling_factor",
)


def supported_models() -> tuple[str, ...]:
    """The `model_type`s that are tested. Others are tried as transformers has them."""
    return tuple(knowledge()["families"])


def lint_config(config: dict[str, Any], allow: frozenset[str] = frozenset()) -> None:
    """Check all keys and the values that matter; `allow` names unknown keys to let pass.

    ConfigError names the key, its value and `--allow-unknown-key KEY`; UnsupportedModelError
    lists the supported models.
    """
    for problem in config_problems(config, allow):
        raise problem


def config_problems(config: dict[str, Any], allow: frozenset[str]) -> Iterator[SitscError]:
    """What `lint_config` would raise, all of it: keys first, then values."""
    try:
        family = family_of(config)
    except SitscError as error:
        yield error
        return
    named = canonical(config, family)
    for key, value in config.items():
        yield from _caught(partial(check_key, key, value, family, allow))
    checks = [
        partial(_check_count, named, key, key in family.get("optional", ())) for key in COUNTS
    ]
    checks += [partial(_check_count, named, key, True) for key in OPTIONAL_COUNTS]
    checks += [partial(_check_flag, named, key) for key in FLAGS]
    checks += [partial(_check_positive, named, key) for key in POSITIVE]
    later = (_check_heads, _check_experts, _check_window)
    checks += [partial(_check_dtype, config)]
    checks += [partial(_check_activation, named), partial(_check_dense_layers, named)]
    bad = 0
    for check in checks:
        for problem in _caught(check):
            bad += 1
            yield problem
    if bad:  # what follows computes with these numbers
        return
    checks = [partial(check, named, family) for check in later]
    checks += [partial(_check_layer_types, named), partial(check_rope, named, family, allow)]
    for check in checks:
        yield from _caught(check)


def _caught(check: partial[None]) -> Iterator[SitscError]:
    try:
        check()
    except SitscError as error:
        yield error


def lint_tensors(
    config: dict[str, Any], tensors: Mapping[str, TensorInfo], nested: Nested | None = None
) -> TensorLint:
    """Compare tensors with what the config calls for.

    ConfigError for a missing, unexpected or misshapen tensor; the result names those that are left
    out on purpose. The config must have passed `lint_config`.
    """
    family = family_of(config)
    named = canonical(config, family)
    result, problems = tensor_problems(
        named, family_shapes(config, named, family, tensors), tensors, nested
    )
    for problem in problems:
        raise problem
    return result


def _check_count(config: dict[str, Any], key: str, optional: bool) -> None:
    value = config.get(key)
    if not (_is_count(value) or (optional and value is None)):
        raise bad_value(key, value, "a positive whole number is needed")


def _check_flag(config: dict[str, Any], key: str) -> None:
    if config.get(key) is not None and type(config[key]) is not bool:
        raise bad_value(key, config[key], "true or false is needed")


def _check_positive(config: dict[str, Any], key: str) -> None:
    required = key == "rms_norm_eps" and key in config
    if (required or config.get(key) is not None) and not is_positive(config[key]):
        raise bad_value(key, config[key], "a positive number is needed")


def _check_dense_layers(config: dict[str, Any]) -> None:
    dense = config.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(i) is int for i in dense)):
        raise bad_value("mlp_only_layers", dense, "a list of layer numbers is needed")


def _check_heads(config: dict[str, Any], family: dict[str, Any]) -> None:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads is None and not family.get("default_kv_heads", True):
        raise bad_value("num_key_value_heads", None, "this family has no safe default")
    if heads % (kv_heads or heads):
        raise bad_value("num_key_value_heads", kv_heads, f"it must divide the {heads} query heads")
    if config.get("kv_lora_rank") and kv_heads not in (None, heads):
        hint = f"latent attention has a key for each of the {heads} query heads: give that number"
        raise bad_value("num_key_value_heads", kv_heads, hint)
    own = config.get("head_dim") or family.get("head_dim") or config.get("v_head_dim")
    if own is None and config["hidden_size"] % heads:
        raise bad_value("hidden_size", config["hidden_size"], f"{heads} heads do not divide it")


def _check_experts(config: dict[str, Any], family: dict[str, Any]) -> None:
    del family
    counts = ("n_routed_experts", "num_experts", "num_local_experts")
    total = next((config[key] for key in counts if config.get(key)), None)
    chosen = config.get("num_experts_per_tok")
    if total is not None and chosen is not None and chosen > total:
        raise bad_value("num_experts_per_tok", chosen, f"there are {total} experts")
    groups = config.get("n_group")
    if total is None or groups is None:
        return
    if not _is_count(groups) or total % groups:
        raise bad_value("n_group", groups, f"it must divide the {total} experts")
    if not _is_count(config.get("topk_group")) or config["topk_group"] > groups:
        raise bad_value("topk_group", config.get("topk_group"), f"there are {groups} groups")
    seen = total // groups * config["topk_group"]
    if chosen is not None and chosen > seen:
        raise bad_value("num_experts_per_tok", chosen, f"the chosen groups have {seen} experts")


def _check_window(config: dict[str, Any], family: dict[str, Any]) -> None:
    del family
    window, types = config.get("sliding_window"), config.get("layer_types")
    sliding = isinstance(types, list) and "sliding_attention" in types
    # transformers writes 0 for some families whose layers are all of the other kind.
    unused = window == 0 and not sliding and (types or config.get("use_sliding_window") is False)
    if window is not None and not unused and not _is_count(window):
        raise bad_value("sliding_window", window, "a positive whole number or null is needed")
    if sliding and window is None and "sliding_window" in config:
        raise bad_value("sliding_window", None, "layer_types names sliding_attention: how wide?")
    if sliding and config.get("use_sliding_window") is False:
        raise bad_value("use_sliding_window", False, "layer_types names sliding_attention")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _check_activation(config: dict[str, Any]) -> None:
    known = knowledge()["activations"]["known"]
    for key in ("hidden_act", "hidden_activation", "activation_function"):
        value = config.get(key)
        if value is not None and value not in known:
            raise bad_value(key, value, f"known: {', '.join(known)}")


def _check_dtype(config: dict[str, Any]) -> None:
    given = [config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None]
    for value in given:
        if value not in DTYPES:
            raise bad_value("dtype", value, f"known: {', '.join(DTYPES)}")
    if len(given) == 2 and given[0] != given[1]:
        raise bad_value("torch_dtype", given[1], f"dtype says {given[0]}; keep one of them")


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
