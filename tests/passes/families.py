"""Tiny configurations of model families, for tests of tracing and passes."""

from typing import Any

from sitsc.models.presets import preset

_LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_BASE = {
    key: value
    for key, value in preset("tiny-llama").items()
    if key not in ("architectures", "attention_bias", "mlp_bias", "torch_dtype")
}


def _family(model_type: str, **changes: Any) -> dict[str, Any]:
    config = _BASE | {"model_type": model_type} | changes
    return {key: value for key, value in config.items() if value is not None}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": preset("tiny-llama"),
    "llama_tied": preset("tiny-llama-tied"),
    "llama3_rope_scaling": preset("tiny-llama31"),
    "llama3_rope_parameters": _family(
        "llama", rope_theta=None, rope_parameters=_LLAMA31 | {"rope_theta": 10000.0}
    ),
    "odd_sizes": preset("tiny-odd"),
    "qwen2": preset("tiny-qwen2"),
    "qwen3": _family("qwen3"),
    "mistral_window": _family("mistral", sliding_window=16),
    "gemma": _family("gemma", hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
    "phi3_partial": _family("phi3", head_dim=None, partial_rotary_factor=0.5, pad_token_id=0),
}
