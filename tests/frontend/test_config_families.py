"""A full config of every family, all keys as transformers writes them: each key is classified."""

import json
from functools import cache
from typing import Any

import pytest

from sitsc.core.errors import ConfigError
from sitsc.frontend.config_knowledge import family_of, knowledge, use_of
from sitsc.frontend.config_lint import lint_config, lint_tensors, supported_models
from sitsc.frontend.model_tensors import model_shapes
from tests.frontend.test_config_lint import infos

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3") + (
    "ministral3",
    "gpt2",
    "gpt_neox",
    "starcoder2",
    "olmo2",
    "cohere",
    "glm4",
    "granite",
    "smollm3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "stablelm",
)
# Keys that decide what a family computes: a change of the list must not make one of them inert.
DECISIVE = {
    "llama": ["hidden_act", "attention_bias", "mlp_bias", "rms_norm_eps", "rope_parameters"],
    "mistral": ["sliding_window", "head_dim"],
    "qwen2": ["layer_types", "max_window_layers", "use_sliding_window"],
    "gemma2": ["attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"],
    "gemma3_text": ["layer_types", "rope_parameters", "query_pre_attn_scalar"],
    "phi3": ["original_max_position_embeddings"],
    "gpt2": ["scale_attn_weights", "scale_attn_by_inverse_layer_idx", "activation_function"],
    "gpt_neox": ["use_parallel_residual", "layer_norm_eps"],
    "starcoder2": ["use_bias", "norm_epsilon", "sliding_window"],
    "cohere": ["logit_scale", "use_qk_norm"],
    "granite": ["embedding_multiplier", "residual_multiplier", "logits_scaling"]
    + ["attention_multiplier"],
    "smollm3": ["no_rope_layers"],
    "qwen3_moe": ["norm_topk_prob", "num_experts_per_tok", "mlp_only_layers"],
    "gpt_oss": ["layer_types", "sliding_window"],
    "deepseek_v3": ["routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"]
    + ["first_k_dense_replace", "rope_interleave", "kv_lora_rank"],
    "stablelm": ["use_parallel_residual", "use_qkv_bias", "qk_layernorm", "layer_norm_eps"],
}


@cache
def written(family: str) -> str:
    from transformers import AutoConfig  # noqa: PLC0415  (seconds)

    return AutoConfig.for_model(family).to_json_string(use_diff=False)


def config_of(family: str) -> dict[str, Any]:
    """The family's own defaults, which are those of a published model."""
    architecture = knowledge()["families"][family]["architecture"]
    return json.loads(written(family)) | {"architectures": [architecture]}


def test_every_family_is_covered():
    assert set(FAMILIES) == set(supported_models())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_transformers_writes_is_classified(family: str):
    config = config_of(family)
    known = family_of(config)
    uses = {key: use_of(key, value, known) for key, value in config.items()}
    assert set(uses.values()) <= {"consumed", "inert", "inert at this value"}, uses
    for key in DECISIVE.get(family, ()):
        assert key in config and uses[key] == "consumed", key
    lint_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_of_another_family_is_an_error(family: str):
    for key, value in (("clip_qkv", 8.0), ("alibi", True), ("my_new_multiplier", 2.0)):
        with pytest.raises(ConfigError, match=f"unknown key '{key}'.*--allow-unknown-key {key}"):
            lint_config(config_of(family) | {key: value})


@pytest.mark.parametrize("family", FAMILIES)
def test_values_that_switch_to_other_code_are_errors(family: str):
    for key, value in (("add_cross_attention", True), ("is_encoder_decoder", True)):
        with pytest.raises(ConfigError, match=key):
            lint_config(config_of(family) | {key: value})


def test_a_checkpoint_of_gpt2_as_first_published():
    """Names without the module's prefix and saved mask buffers."""
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4}
    config |= {"n_positions": 64, "n_ctx": 64, "bos_token_id": None, "eos_token_id": None}
    lint_config(config)
    shapes, tied = model_shapes(config)
    assert tied == {"lm_head.weight": "transformer.wte.weight"}
    masks = {"transformer.h.0.attn.bias": (1, 1, 64, 64), "transformer.h.0.attn.masked_bias": ()}
    result = lint_tensors(config, infos(shapes | masks, "F32"))
    assert set(result.rules.values()) == {"causal_mask_buffer"} and len(result.ignored) == 2
    short = {name.removeprefix("transformer."): shape for name, shape in (shapes | masks).items()}
    with pytest.raises(ConfigError, match=r"lack the prefix 'transformer'.*save_pretrained"):
        lint_tensors(config, infos(short, "F32"))
