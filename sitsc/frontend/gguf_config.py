"""GGUF metadata to a Hugging Face style config and tensor names, for the architectures we read.

In: `GgufHeader`. Out: config dict (the family's keys) and HF name → GGUF tensor. A metadata key
of the architecture that is not understood goes into the config under its own name, so that the
config check refuses it.
"""

import math
import re
import struct
from typing import Any

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.gguf_families import (
    FAMILIES,
    ROPE_FACTORS,
    SHORT_FACTORS,
    TOP_NAMES,
    GgufFamily,
)
from sitsc.frontend.gguf_header import GgufHeader, GgufTensor
from sitsc.frontend.safe_files import shown

LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
# Metadata that says nothing beyond what is read elsewhere.
INERT = {"vocab_size", "attention.layer_norm_epsilon", "attention.value_length", "expert_count"} | {
    "expert_used_count"
}


def hf_names(header: GgufHeader, family: GgufFamily) -> dict[str, GgufTensor]:
    """Tensors by their Hugging Face names; a name that the family does not have is refused."""
    result: dict[str, GgufTensor] = {}
    for name, tensor in header.tensors.items():
        match = LAYER_PATTERN.fullmatch(name)
        if name in TOP_NAMES:
            result[TOP_NAMES[name]] = tensor
        elif name in family.factors:
            result[name] = tensor
        elif match and match[2] in family.layer_names:
            result[f"model.layers.{match[1]}.{family.layer_names[match[2]]}.{match[3]}"] = tensor
        else:
            raise UnsupportedModelError(
                f"{tensor.info.file} holds tensor {shown(name)}, which no model of architecture "
                f"{family.model_type} has"
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


def architecture(metadata: dict[str, Any]) -> GgufFamily:
    """The file's family; UnsupportedModelError unless it is one we read."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise UnsupportedModelError(
            f"GGUF architecture {shown(arch)} is not supported",
            hint=f"supported: {', '.join(FAMILIES)}",
        )
    return FAMILIES[arch]


def hf_config(metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """Config in the family's keys; `tensors` are by HF name (ties, biases, vocabulary)."""
    family = architecture(metadata)
    m = _Metadata(metadata, family.model_type)
    if m.values.get("expert_count") not in (None, 0):
        raise UnsupportedModelError("mixture-of-experts models in GGUF are not supported")
    hidden, heads = m.get("embedding_length", int), m.get("attention.head_count", int)
    head_dim = m.get("attention.key_length", int, hidden // heads)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": m.get("feed_forward_length", int),
        "num_hidden_layers": m.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": m.get("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": m.get("context_length", int),
        "rms_norm_eps": m.get("attention.layer_norm_rms_epsilon", float),
        "vocab_size": _vocab_size(metadata, tensors),
        "rope_theta": m.get("rope.freq_base", float, 10000.0),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    config |= dict(family.extra) | _rotary(m, head_dim, family)
    if family.biases:
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in tensors
    if family.window:
        config["sliding_window"] = _window(m)
    config |= _rope_scaling(m)
    for key in ("bos_token_id", "eos_token_id"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and type(value) is not int:
            raise CheckpointError(f"tokenizer.ggml.{key} is {shown(value)}")
        if value is not None:
            config[key] = value
    if SHORT_FACTORS in family.factors:
        config |= _original_context(m, config)
    return config | m.unknown()


def _rotary(m: _Metadata, head_dim: int, family: GgufFamily) -> dict[str, Any]:
    """`partial_rotary_factor` where the family has one; other widths are refused."""
    rotary = m.get("rope.dimension_count", int, head_dim)
    fits = rotary == head_dim or (family.partial and rotary < head_dim and rotary % 2 == 0)
    if not fits or m.values.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"rotary width {rotary} or value width differs from head_dim {head_dim}"
        )
    return {"partial_rotary_factor": rotary / head_dim} if rotary != head_dim else {}


def _window(m: _Metadata) -> int | None:
    """`sliding_window`; the converter writes 0 for none."""
    if m.values.get("attention.sliding_window") in (None, 0):
        m.used.add("attention.sliding_window")
        return None
    return m.get("attention.sliding_window", int)


def _original_context(m: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    if not m.has("rope.scaling.original_context_length"):
        return {"original_max_position_embeddings": config["max_position_embeddings"]}
    original = m.get("rope.scaling.original_context_length", int)
    return {"original_max_position_embeddings": original}


def longrope_scaling(
    short: list[float], long: list[float], metadata: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """`rope_scaling` of Phi-3's two lists of factors; the attention factor must be as usual."""
    if "rope_scaling" in config:
        raise UnsupportedModelError("the file holds rope factors and another rope scaling")
    numbers = [*short, *long]
    if not all(math.isfinite(value) and value > 0 for value in numbers):
        raise CheckpointError("rope factors are not positive numbers")
    longest, original = (
        config["max_position_embeddings"],
        config["original_max_position_embeddings"],
    )
    usual = 1.0
    if longest > original > 1:
        usual = math.sqrt(1 + math.log(longest / original) / math.log(original))
    given = metadata.get("phi3.rope.scaling.attn_factor")
    if given is not None and not (
        type(given) is float and math.isclose(given, usual, rel_tol=1e-5)
    ):
        raise UnsupportedModelError(
            f"phi3.rope.scaling.attn_factor is {shown(given)}, longrope gives {usual:.6g}"
        )
    shorts, longs = ([shortest(value) for value in values] for values in (short, long))
    return {"rope_scaling": {"type": "longrope", "short_factor": shorts, "long_factor": longs}}


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
    m.used.add("rope.scaling.attn_factor")  # of longrope, compared where its factors are
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
