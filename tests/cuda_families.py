"""Tiny configurations of families whose CUDA plans are executed in the interpreter.

Windows are shorter than the sequences of the tests, pages too; sizes are as odd as families allow.
"""

from typing import Any

from sitsc.models.presets import preset

VOCABULARY = 112
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_LAYER_NORM: dict[str, Any] = {"rms_norm_eps": None, "layer_norm_eps": 1e-5, "head_dim": None}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GPT = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "vocab_size": VOCABULARY}


def _config(model_type: str, **changes: Any) -> dict[str, Any]:
    config = _SIZES | {"model_type": model_type} | changes
    return {key: value for key, value in config.items() if value is not None}


CUDA_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _config("llama", num_hidden_layers=3, tie_word_embeddings=True),
    "llama_odd_biased": _config(
        "llama",
        hidden_size=36,
        intermediate_size=50,
        head_dim=20,
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral_window": _config("mistral", sliding_window=6),
    "qwen2": _config("qwen2", head_dim=None),
    "qwen3": _config("qwen3", num_hidden_layers=3),
    "gemma2": _config(
        "gemma2",
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        **_SLIDING,
        **_GEMMA,
    ),
    "gemma3": _config("gemma3_text", query_pre_attn_scalar=16, **_SLIDING, **_GEMMA),
    "phi3_partial": _config("phi3", head_dim=None, partial_rotary_factor=0.5),
    "olmo2": _config("olmo2", num_hidden_layers=3, head_dim=None),
    "granite": _config(
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
        logits_scaling=8.0,
        head_dim=None,
    ),
    "smollm3": _config("smollm3", no_rope_layers=[1, 0], rope_theta=None),
    "starcoder2": _config(
        "starcoder2",
        norm_epsilon=1e-5,
        use_bias=True,
        sliding_window=6,
        **(_LAYER_NORM | {"layer_norm_eps": None}),
    ),
    "gpt_neox": _config(
        "gpt_neox",
        num_hidden_layers=3,
        num_key_value_heads=None,
        rope_theta=None,
        rotary_pct=0.5,
        **_LAYER_NORM,
    ),
    "gpt2": {"model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 2} | _GPT,
    "cohere": _config(
        "cohere", logit_scale=0.25, use_qk_norm=True, tie_word_embeddings=True, **_LAYER_NORM
    ),
    "glm4": _config("glm4", partial_rotary_factor=0.5, attention_bias=True),
}

_QWEN2 = {
    k: v for k, v in preset("tiny-qwen3-moe").items() if k not in ("head_dim", "attention_bias")
}
CUDA_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": preset("tiny-mixtral"),
    "qwen3_moe": preset("tiny-qwen3-moe"),
    "gpt_oss": preset("tiny-gpt-oss"),
    "qwen2_moe": _QWEN2
    | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 32,
        "norm_topk_prob": False,
    },
}
