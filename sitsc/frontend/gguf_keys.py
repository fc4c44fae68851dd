"""Config keys that some GGUF architectures have beyond those of all: experts, windows, multipliers.

In: the metadata and what is known of the family. Out: Hugging Face keys. Values that files leave
out are those that llama.cpp takes.
"""

from typing import Any

from sitsc.core.errors import CheckpointError
from sitsc.frontend.gguf_families import GgufFamily
from sitsc.frontend.gguf_metadata import Metadata
from sitsc.frontend.safe_files import shown

SLIDING, FULL = "sliding_attention", "full_attention"
_LOCAL_BASE = 10000.0


def number_keys(m: Metadata, family: GgufFamily, head_dim: int) -> dict[str, Any]:
    """Softcaps and multipliers."""
    found: dict[str, Any] = {}
    for key, (name, usual) in family.numbers.items():
        m.used.add(name)
        found[key] = m.get(name, float) if m.has(name) else usual
    if "attention_multiplier" in found and found["attention_multiplier"] is None:
        found["attention_multiplier"] = head_dim**-0.5
    return found


def expert_keys(m: Metadata, family: GgufFamily) -> dict[str, Any]:
    """How many experts there are, how many a token takes, and their sizes."""
    if not family.experts:
        return {}
    counts = {"num_experts_per_tok": m.get("expert_used_count", int)}
    key = "num_local_experts" if family.model_type == "mixtral" else "num_experts"
    counts[key] = m.get("expert_count", int)
    if family.model_type != "mixtral":
        counts["moe_intermediate_size"] = m.get("expert_feed_forward_length", int)
    if "ffn_up_shexp" in family.layer_names:
        size = m.get("expert_shared_feed_forward_length", int)
        counts["shared_expert_intermediate_size"] = size
    return counts


def pattern_keys(m: Metadata, family: GgufFamily, config: dict[str, Any]) -> dict[str, Any]:
    """Gemma's keys: which layers have a window, rope by kind of layer, scale of the attention."""
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    large = layers == family.large
    config = config | {
        "sliding_window": m.get("attention.sliding_window", int),
        "layer_types": _layer_types(m, family.pattern, layers),
        "query_pre_attn_scalar": config["hidden_size"] // heads if large else config["head_dim"],
    }
    if family.model_type == "gemma2":
        return config
    base = config.pop("rope_theta")
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    local = m.get("rope.freq_base_swa", float, _LOCAL_BASE)
    rope = {SLIDING: {"rope_type": "default", "rope_theta": local}}
    rope[FULL] = scaling | {"rope_theta": base}
    return config | {"rope_parameters": rope}


def _layer_types(m: Metadata, pattern: int, layers: int) -> list[str]:
    """The kind of each layer; newer files may say it as a number or layer by layer."""
    key = "attention.sliding_window_pattern"
    given = m.values.get(key)
    if isinstance(given, list):
        m.used.add(key)
        if len(given) != layers or not all(type(value) is bool for value in given):
            raise CheckpointError(f"{m.arch}.{key} is {shown(given)}")
        return [SLIDING if value else FULL for value in given]
    every = m.get(key, int, pattern)
    return [FULL if (layer + 1) % every == 0 else SLIDING for layer in range(layers)]
