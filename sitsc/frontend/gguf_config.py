"""GGUF metadata of the Llama architecture to a Hugging Face style config and tensor names.

In: `GgufHeader`. Out: config dict (LlamaConfig's keys) and HF name → GGUF tensor. A metadata key
of the architecture that is not understood goes into the config under its own name, so that the
config check refuses it.
"""

import math
import re
import struct
from typing import Any

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.gguf_header import GgufHeader, GgufTensor
from sitsc.frontend.safe_files import shown

SUPPORTED = ("llama",)
ROPE_FACTORS = "rope_freqs.weight"
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    ROPE_FACTORS: ROPE_FACTORS,
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
# Metadata that says nothing beyond what is read elsewhere.
INERT = {"vocab_size", "attention.layer_norm_epsilon", "attention.value_length", "expert_count"} | {
    "expert_used_count"
}


def hf_names(header: GgufHeader) -> dict[str, GgufTensor]:
    """Tensors by their Hugging Face names; a name outside the Llama family is refused."""
    result: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        match = LAYER_PATTERN.fullmatch(name)
        if name in TOP_NAMES:
            result[TOP_NAMES[name]] = tensor
        elif match and match[2] in LAYER_NAMES:
            result[f"model.layers.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"] = tensor
        else:
            raise UnsupportedModelError(
                f"{tensor.info.file} holds tensor {shown(name)}, which no Llama model has"
            )
    return result


class _Metadata:
    """Typed access to `llama.*` keys that remembers which were used."""

    def __init__(self, metadata: dict[str, Any], arch: str) -> None:
        self.values = {
            k.removeprefix(f"{arch}."): v for k, v in metadata.items() if k.startswith(f"{arch}.")
        }
        self.arch, self.used = arch, set(INERT)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Value of `key`; without a default its absence is an error."""
        self.used.add(key)
        value = self.values.get(key, default)
        if value is None:
            raise CheckpointError(f"metadata key {self.arch}.{key} is missing")
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self.arch}.{key} differs from layer to layer")
        good = type(value) is kind
        if kind in (int, float):
            good = good and 0 < value < 1 << 31
        if not good:
            raise CheckpointError(f"{self.arch}.{key} is {shown(value)}")
        return shortest(value) if kind is float else value

    def has(self, key: str) -> bool:
        return key in self.values

    def unknown(self) -> dict[str, Any]:
        """Keys nobody asked for, under their full name."""
        return {f"{self.arch}.{k}": v for k, v in self.values.items() if k not in self.used}


def shortest(value: float) -> float:
    """The decimal number a float32 was written from: 9.99999974e-06 is 1e-05."""
    for digits in range(1, 10):
        text = float(f"{value:.{digits}g}")
        try:
            if struct.pack("<f", text) == struct.pack("<f", value):
                return text
        except OverflowError:
            continue
    return value


def architecture(metadata: dict[str, Any]) -> str:
    """The file's architecture; UnsupportedModelError unless it is one we read."""
    arch = metadata.get("general.architecture")
    if arch not in SUPPORTED:
        raise UnsupportedModelError(
            f"GGUF architecture {shown(arch)} is not supported",
            hint=f"supported: {', '.join(SUPPORTED)}",
        )
    return str(arch)


def hf_config(metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """Config in LlamaConfig's keys; `tensors` are by HF name (ties, biases, vocabulary)."""
    m = _Metadata(metadata, architecture(metadata))
    if m.values.get("expert_count") not in (None, 0):
        raise UnsupportedModelError("mixture-of-experts models in GGUF are not supported")
    hidden, heads = m.get("embedding_length", int), m.get("attention.head_count", int)
    head_dim = m.get("attention.key_length", int, hidden // heads)
    _check_heads(m, head_dim)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": m.get("feed_forward_length", int),
        "num_hidden_layers": m.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": m.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": m.get("context_length", int),
        "rms_norm_eps": m.get("attention.layer_norm_rms_epsilon", float),
        "vocab_size": _vocab_size(metadata, tensors),
        "rope_theta": m.get("rope.freq_base", float, 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in tensors,
    }
    config |= _rope_scaling(m)
    for key in ("bos_token_id", "eos_token_id"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and type(value) is not int:
            raise CheckpointError(f"tokenizer.ggml.{key} is {shown(value)}")
        if value is not None:
            config[key] = value
    return config | m.unknown()


def _check_heads(m: _Metadata, head_dim: int) -> None:
    rotary = m.get("rope.dimension_count", int, head_dim)
    if rotary != head_dim or m.values.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"rotary width {rotary} or value width differs from head_dim {head_dim}"
        )


def _vocab_size(metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    embedding = tensors.get("model.embed_tokens.weight")
    num_rows = embedding.info.shape[0] if embedding else num_tokens
    if num_tokens > num_rows or not num_rows:
        raise CheckpointError(f"{num_tokens} tokens, but an embedding of {num_rows} rows")
    return num_rows


def llama3_scaling(factors: list[float], config: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` whose llama3 formula gives these divisors of the rotary frequencies.

    The file keeps the result, not the parameters: all published models use the ones tried here,
    and anything else is refused.
    """
    if all(value == 1.0 for value in factors):
        return {}
    low, high, original, factor = 1.0, 4.0, 8192, max([1.0, *factors])
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
    head_dim, theta = config["head_dim"], config["rope_theta"]
    expected = []
    for i in range(head_dim // 2):
        turns = original / (2 * math.pi * theta ** (2 * i / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    same = len(factors) == len(expected) and all(
        math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)
    )
    if not same or "rope_scaling" in config:
        raise UnsupportedModelError(
            f"{ROPE_FACTORS} are not the factors of a known rope scaling",
            hint="give the checkpoint as safetensors with its config.json",
        )
    return {"rope_scaling": scaling}


def _rope_scaling(m: _Metadata) -> dict[str, Any]:
    """`rope_scaling` for linear and YaRN; nothing for none."""
    kind = m.get("rope.scaling.type", str, "none")
    if kind == "none" and not m.has("rope.scale_linear"):
        return {}
    if kind not in ("none", "linear", "yarn"):
        raise UnsupportedModelError(f"rope scaling {shown(kind)} is not supported")
    old = m.get("rope.scale_linear", float, 1.0)
    factor = m.get("rope.scaling.factor", float, old)
    scaling: dict[str, Any] = {"rope_type": "yarn" if kind == "yarn" else "linear"}
    scaling["factor"] = factor
    if kind == "yarn":
        original = m.get("rope.scaling.original_context_length", int)
        scaling["original_max_position_embeddings"] = original
    m.used.add("rope.scaling.finetuned")
    return {"rope_scaling": scaling}
