"""GGUF metadata to a Hugging Face style config and tensor names, for the architectures we read.

In: `GgufHeader`. Out: config dict (the family's keys) and HF name → GGUF tensor. A metadata key
that is not understood goes into the config under its own name, so that the config check refuses it.
"""

import math
import re
from dataclasses import replace
from typing import Any

from sitsc.core.errors import CheckpointError, UnsupportedModelError
from sitsc.frontend.gguf_families import (
    FAMILIES,
    MIXTRAL,
    ROPE_FACTORS,
    SHORT_FACTORS,
    TOP_NAMES,
    GgufFamily,
)
from sitsc.frontend.gguf_header import GgufHeader, GgufTensor
from sitsc.frontend.gguf_keys import expert_keys, number_keys, pattern_keys
from sitsc.frontend.gguf_metadata import Metadata, shortest
from sitsc.frontend.gguf_other_keys import check_vocabulary, other_keys
from sitsc.frontend.safe_files import shown

LAYER_PATTERN = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.([a-z_]+)\.(weight|bias)")
ONE_ROW = "ffn_gate_inp_shexp"  # a matrix of one row, which files may hold as a vector
MAX_EXPERTS, MAX_TENSORS = 1 << 10, 1 << 18


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
            if match[2] == ONE_ROW and len(tensor.info.shape) == 1:
                tensor = replace(tensor, info=replace(tensor.info, shape=(1, *tensor.info.shape)))
            result[f"model.layers.{match[1]}.{family.layer_names[match[2]]}.{match[3]}"] = tensor
        elif match and match[2] in family.experts and match[3] == "weight":
            prefix = f"model.layers.{match[1]}.{family.experts[match[2]]}.weight"
            for expert, part in enumerate(_apart(tensor)):
                result[prefix.format(expert)] = part
            if len(result) > MAX_TENSORS:
                raise CheckpointError(f"the experts are more than {MAX_TENSORS} matrices")
        else:
            raise UnsupportedModelError(
                f"{tensor.info.file} holds tensor {shown(name)}, which no model of architecture "
                f"{family.model_type} has"
            )
    return result


def _apart(tensor: GgufTensor) -> list[GgufTensor]:
    """The matrices [out, in] of a stack of experts."""
    info = tensor.info
    count = info.shape[0] if len(info.shape) == 3 else 0
    if not 0 < count <= MAX_EXPERTS or info.nbytes % count:
        raise CheckpointError(
            f"{info.name} {list(info.shape)} is no stack of up to {MAX_EXPERTS} experts"
        )
    nbytes = info.nbytes // count
    part = replace(info, shape=info.shape[1:], nbytes=nbytes)
    return [GgufTensor(part, tensor.offset + expert * nbytes) for expert in range(count)]


def architecture(metadata: dict[str, Any]) -> GgufFamily:
    """The file's family; UnsupportedModelError unless it is one we read."""
    arch = metadata.get("general.architecture")
    if arch == "llama" and metadata.get("llama.expert_count") not in (None, 0):
        return MIXTRAL
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise UnsupportedModelError(
            f"GGUF architecture {shown(arch)} is not supported",
            hint=f"supported: {', '.join(FAMILIES)}",
        )
    return FAMILIES[arch]


def hf_config(metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """Config in the family's keys; `tensors` are by HF name (ties, biases, vocabulary)."""
    family = architecture(metadata)
    m = Metadata(metadata, str(metadata["general.architecture"]))
    if m.values.get("expert_count") not in (None, 0) and not family.experts:
        raise UnsupportedModelError(f"experts in a GGUF file of architecture {m.arch}")
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
        "vocab_size": _vocab_size(metadata, tensors, m.arch),
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
    config |= number_keys(m, family, head_dim) | expert_keys(m, family)
    if family.pattern:
        config = pattern_keys(m, family, config)
    for key in ("bos_token_id", "eos_token_id"):
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and type(value) is not int:
            raise CheckpointError(f"tokenizer.ggml.{key} is {shown(value)}")
        if value is not None:
            config[key] = value
    if SHORT_FACTORS in family.factors:
        config |= _original_context(m, config)
    return config | m.unknown() | other_keys(metadata, m.arch)


def _rotary(m: Metadata, head_dim: int, family: GgufFamily) -> dict[str, Any]:
    """`partial_rotary_factor` where the family has one; other widths are refused."""
    rotary = m.get("rope.dimension_count", int, head_dim)
    fits = rotary == head_dim or (family.partial and rotary < head_dim and rotary % 2 == 0)
    if not fits or m.values.get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"rotary width {rotary} or value width differs from head_dim {head_dim}"
        )
    return {"partial_rotary_factor": rotary / head_dim} if rotary != head_dim else {}


def _window(m: Metadata) -> int | None:
    """`sliding_window`; the converter writes 0 for none."""
    if m.values.get("attention.sliding_window") in (None, 0):
        m.used.add("attention.sliding_window")
        return None
    return m.get("attention.sliding_window", int)


def _original_context(m: Metadata, config: dict[str, Any]) -> dict[str, Any]:
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


def _vocab_size(metadata: dict[str, Any], tensors: dict[str, GgufTensor], arch: str) -> int:
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else 0
    embedding = tensors.get("model.embed_tokens.weight")
    num_rows = embedding.info.shape[0] if embedding else num_tokens
    if num_tokens > num_rows or not num_rows:
        raise CheckpointError(f"{num_tokens} tokens, but an embedding of {num_rows} rows")
    check_vocabulary(metadata, arch, num_rows)
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


def _rope_scaling(m: Metadata) -> dict[str, Any]:
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
