"""A small configuration of the same shape, for checks that execute the graph."""

from typing import Any

_HEAD_DIM = 16
_LAYERS = 2
# The most of each; a config that has fewer keeps them.
_EXPERTS = {
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
}


def tiny_config(config: dict[str, Any]) -> dict[str, Any]:
    """Two layers, heads in the same proportion, head_dim 16; every other key is kept."""
    heads = int(config.get("num_attention_heads", 4))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    group = max(1, heads // max(1, kv_heads))
    small_kv = 2 if kv_heads > 1 else 1
    small = dict(config)
    small |= {
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": group * small_kv,
        "num_key_value_heads": small_kv,
        "head_dim": _HEAD_DIM,
        "hidden_size": group * small_kv * _HEAD_DIM,
        "intermediate_size": 96,
        "vocab_size": 320,
    }
    small |= {key: min(small[key], most) for key, most in _EXPERTS.items() if small.get(key)}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        small.pop(key, None)
    if isinstance(layers := small.get("layer_types"), list):
        small["layer_types"] = _sample(layers)
    return small


def _sample(layers: list[str]) -> list[str]:
    """Two layer types that show every kind when there are two."""
    kinds = list(dict.fromkeys(layers))
    return (kinds * _LAYERS)[:_LAYERS]
