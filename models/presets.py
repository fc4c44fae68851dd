"""Model presets: config.json contents by name, public figures and small ones for tests.

In: a name. Out: a config dict of Hugging Face keys; weights are always random (random_checkpoint).
"""

import copy
from typing import Any

from sitsc.models.published import PUBLISHED

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
_LLAMA3_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA32_1B = _LLAMA3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
_SMOLLM2_135M = _LLAMA | {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY = _LLAMA | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_LLAMA31_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_TINY_QWEN2 = {k: v for k, v in _TINY.items() if k not in ("attention_bias", "mlp_bias")} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "use_sliding_window": False,
}
_TINY_QWEN2.pop("head_dim")
_TINY_QWEN3_MOE = _TINY_QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "attention_bias": False,
    "moe_intermediate_size": 40,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_TINY_MIXTRAL = {k: v for k, v in _TINY.items() if k not in ("attention_bias", "mlp_bias")} | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
_TINY_GPT_OSS = {k: v for k, v in _TINY.items() if k != "mlp_bias"} | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "num_local_experts": 12,
    "num_experts_per_tok": 3,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "swiglu_limit": 7.0,
}
# Nothing is a multiple of 16: heads do not fill the hidden size either.
_TINY_ODD = _TINY | {
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "vocab_size": 259,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": _LLAMA3_8B,
    "llama32-1b": _LLAMA32_1B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "smollm2-135m": _SMOLLM2_135M,
    **PUBLISHED,
    "tiny-llama": _TINY,
    "tiny-llama-tied": _TINY | {"tie_word_embeddings": True},
    "tiny-llama31": _TINY | {"rope_scaling": _LLAMA31_SCALING},
    "tiny-qwen2": _TINY_QWEN2,
    "tiny-mixtral": _TINY_MIXTRAL,
    "tiny-qwen3-moe": _TINY_QWEN3_MOE,
    "tiny-gpt-oss": _TINY_GPT_OSS,
    "tiny-odd": _TINY_ODD,
}


def preset(name: str) -> dict[str, Any]:
    """A fresh copy of the config called `name`; ValueError lists the names there are."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return copy.deepcopy(PRESETS[name])
