"""The tensors a config calls for, against those a checkpoint has.

In: a config, what is particular to its family, and tensor headers by name. Out: `TensorLint`, or
ConfigError naming the first missing, unexpected or misshapen tensor.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sitsc.core.errors import ConfigError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import TensorInfo
from sitsc.frontend.experts_lint import experts_shapes, is_sparse, num_experts
from sitsc.frontend.safe_files import shown

Shapes = dict[str, tuple[int, ...]]
# Buffers that old versions saved and that the config determines.
ROTARY_BUFFER = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NOT_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F8_E4M3", "F8_E5M2")


@dataclass(frozen=True, slots=True)
class Family:
    """How a family's tensors differ from Llama's."""

    tied: bool = False
    qkv_bias: bool = False
    qk_norm: str = ""
    fused: bool = False
    head_dim: int = 0
    experts: str = "qwen"
    attention_bias: bool = False
    sinks: bool = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True, slots=True)
class TensorLint:
    """Tensors left out: `duplicates` must equal the tensor they copy before they may be skipped."""

    duplicates: dict[str, str]
    ignored: tuple[str, ...]


def lint_family_tensors(
    config: dict[str, Any], family: Family, tensors: Mapping[str, TensorInfo]
) -> TensorLint:
    """Check names, shapes and kinds of all tensors; ConfigError at the first that is off."""
    # A hostile config must not make us list parameters without end.
    apart = num_experts(config) if family.experts != "stacked" else 0
    at_least = config["num_hidden_layers"] * (apart or 1)
    if at_least > len(tensors):
        raise _bad(
            f"the config calls for more than {at_least} tensors, there are {len(tensors)}",
            "config.json and the weights are of different models, or a shard is missing",
        )
    expected = expected_shapes(config, family)
    ignored = tuple(sorted(name for name in tensors if ROTARY_BUFFER.fullmatch(name)))
    duplicates: dict[str, str] = {}
    if LM_HEAD in tensors and LM_HEAD not in expected:
        duplicates[LM_HEAD] = EMBEDDING
        expected[LM_HEAD] = expected[EMBEDDING]
    if LM_HEAD in expected and LM_HEAD not in tensors:
        raise _bad(
            f"{LM_HEAD} is missing and tie_word_embeddings is false",
            "fetch it, or set tie_word_embeddings to true if the model ties them",
        )
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise _bad(
            f"{len(missing)} tensors are missing, first {missing[0]}",
            "config.json and the weights are of different models, or a shard is missing",
        )
    unexpected = sorted(set(tensors) - set(expected) - set(ignored))
    if unexpected:
        raise _bad(
            f"{len(unexpected)} unexpected tensors, first {shown(unexpected[0])}",
            "config.json does not call for them (a bias flag, more layers, another model?)",
        )
    for name, shape in expected.items():
        _check_tensor(tensors[name], shape)
    return TensorLint(duplicates, ignored)


def _check_tensor(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.dtype in NOT_WEIGHTS:
        raise UnsupportedModelError(
            f"{info.name} is stored as {info.dtype}",
            hint="quantised checkpoints are not read yet; give one in BF16, F16 or F32",
        )
    if info.shape != shape:
        key = "head_dim" if "_proj" in info.name and "self_attn" in info.name else "config.json"
        raise _bad(
            f"{info.name} has shape {list(info.shape)}, the config calls for {list(shape)}",
            f"check {key} against the weights",
        )


def _bad(what: str, hint: str) -> ConfigError:
    return ConfigError(what, where="weights", hint=hint)


def expected_shapes(config: dict[str, Any], family: Family) -> Shapes:
    """Name and shape of every tensor that the config calls for, as checkpoints on disk have them.

    A linear weight is [out features, in features].
    """
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {EMBEDDING: (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config["num_hidden_layers"]):
        block = _attention(config, family) | _mlp(config, family, layer)
        block |= {f"{norm}.weight": (hidden,) for norm in family.norms}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    tied = config.get("tie_word_embeddings")
    if not (family.tied if tied is None else tied):
        shapes[LM_HEAD] = (vocab, hidden)
    return shapes


def _attention(config: dict[str, Any], family: Family) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or family.head_dim or hidden // heads
    q, kv = heads * head_dim, kv_heads * head_dim
    widths = {"qkv_proj": q + 2 * kv} if family.fused else {"q_proj": q, "k_proj": kv, "v_proj": kv}
    given = config.get("attention_bias")
    bias = family.attention_bias if given is None else bool(given)
    shapes = _linear("self_attn.o_proj", hidden, q)
    if bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    for name, width in widths.items():
        shapes |= _linear(f"self_attn.{name}", width, hidden, bias or family.qkv_bias)
    if family.qk_norm:
        per_head = family.qk_norm == "head"
        shapes["self_attn.q_norm.weight"] = (head_dim if per_head else q,)
        shapes["self_attn.k_norm.weight"] = (head_dim if per_head else kv,)
    if family.sinks:
        shapes["self_attn.sinks"] = (heads,)
    return shapes


def _mlp(config: dict[str, Any], family: Family, layer: int) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    bias = bool(config.get("mlp_bias"))
    if family.fused:
        return _linear("mlp.gate_up_proj", 2 * inner, hidden) | _linear(
            "mlp.down_proj", hidden, inner
        )
    if is_sparse(config, layer):
        return experts_shapes(config, family.experts)
    return _glu("mlp", hidden, inner, bias)


def _glu(prefix: str, hidden: int, inner: int, bias: bool) -> Shapes:
    return (
        _linear(f"{prefix}.gate_proj", inner, hidden, bias)
        | _linear(f"{prefix}.up_proj", inner, hidden, bias)
        | _linear(f"{prefix}.down_proj", hidden, inner, bias)
    )


def _linear(name: str, out: int, width: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": (out, width)}
    if bias:
        shapes[f"{name}.bias"] = (out,)
    return shapes
