"""Tiny configurations of every family that must equal transformers when compiled for the CPU.

Windows are shorter than the prompts of the tests; original contexts of scaled rope are, too.
"""

from typing import Any

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_SLIDING: dict[str, Any] = {
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
_LAYER_NORM: dict[str, Any] = {"rms_norm_eps": None, "layer_norm_eps": 1e-5, "head_dim": None}
_GEMMA: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.5, 2.5, 4.0, 8.0],
    "original_max_position_embeddings": 64,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}


def _config(model_type: str, **changes: Any) -> dict[str, Any]:
    config = _SIZES | {"model_type": model_type} | changes
    return {key: value for key, value in config.items() if value is not None}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _config("llama"),
    "llama3_scaled": _config("llama", rope_theta=None, rope_parameters=_LLAMA3),
    "llama_linear": _config(
        "llama",
        rope_theta=None,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    ),
    "llama_biased": _config("llama", attention_bias=True, mlp_bias=True),
    "mistral": _config("mistral", sliding_window=16),
    "mistral_nemo": _config("mistral", sliding_window=None, head_dim=24),
    "ministral3": _config(
        "ministral3",
        rope_theta=None,
        rope_parameters=_YARN
        | {"original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.1}
        | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "qwen2": _config("qwen2", head_dim=None),
    "qwen2_windows": _config(
        "qwen2", head_dim=None, use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": _config("qwen3"),
    "qwen3_yarn": _config("qwen3", rope_theta=None, rope_parameters=_YARN),
    "gemma": _config("gemma", hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
    "gemma2": _config(
        "gemma2",
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
        **_SLIDING,
        **_GEMMA,
    ),
    "gemma3": _config(
        "gemma3_text",
        query_pre_attn_scalar=24,
        rope_theta=None,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        **_SLIDING,
        **_GEMMA,
    ),
    "phi3": _config("phi3", head_dim=None, partial_rotary_factor=0.5),
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "vocab_size": 256,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    "gpt_neox": _config(
        "gpt_neox", num_key_value_heads=None, rope_theta=None, rotary_pct=0.5, **_LAYER_NORM
    ),
    "gpt_neox_serial": _config(
        "gpt_neox",
        num_key_value_heads=None,
        rope_theta=None,
        rotary_pct=0.25,
        use_parallel_residual=False,
        **_LAYER_NORM,
    ),
    "starcoder2": _config(
        "starcoder2",
        norm_epsilon=1e-5,
        use_bias=True,
        sliding_window=16,
        **(_LAYER_NORM | {"layer_norm_eps": None}),
    ),
    "olmo2": _config("olmo2", head_dim=None),
    "cohere": _config(
        "cohere", logit_scale=0.25, use_qk_norm=True, tie_word_embeddings=True, **_LAYER_NORM
    ),
    "cohere_plain": _config(
        "cohere", logit_scale=0.25, use_qk_norm=False, tie_word_embeddings=True, **_LAYER_NORM
    ),
    "glm4": _config("glm4", partial_rotary_factor=0.5, attention_bias=True),
    "phi3_longrope": _config(
        "phi3",
        head_dim=None,
        rope_theta=None,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=64,
        rope_parameters=_LONGROPE | {"partial_rotary_factor": 0.5},
    ),
    "granite": _config(
        "granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
        logits_scaling=8.0,
        head_dim=None,
    ),
    "smollm3": _config("smollm3", no_rope_layers=[1, 0], head_dim=None),
    "mixtral": _config("mixtral", intermediate_size=48, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _config(
        "qwen3_moe", num_experts=12, norm_topk_prob=True, decoder_sparse_step=1, **_EXPERTS
    ),
    "qwen2_moe": _config(
        "qwen2_moe",
        head_dim=None,
        num_experts=12,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
        **_EXPERTS,
    ),
    "gpt_oss": _config(
        "gpt_oss",
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=12,
        num_experts_per_tok=3,
        rope_theta=None,
        rope_parameters=_YARN | {"truncate": False},
        **_SLIDING,
    ),
    "deepseek_v3": _config(
        "deepseek_v3",
        head_dim=None,
        num_key_value_heads=4,
        n_routed_experts=16,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        rope_theta=None,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        **_EXPERTS,
    ),
}
