"""The tensors a config calls for, against those a checkpoint has.

In: a config, what is particular to its family, and tensor headers by name. Out: `TensorLint` and
every problem: tensors missing, unexpected, misshapen or of a kind that cannot be read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from sitsc.core.errors import ConfigError, SitscError, UnsupportedModelError
from sitsc.frontend.checkpoint_names import experts_in_one
from sitsc.frontend.checkpoint_types import Nested, TensorInfo
from sitsc.frontend.config_knowledge import knowledge
from sitsc.frontend.experts_lint import experts_shapes, is_sparse, num_experts
from sitsc.frontend.model_tensors import model_shapes
from sitsc.frontend.nested import ignored_part
from sitsc.frontend.safe_files import shown

Shapes = dict[str, tuple[int, ...]]
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
HEADS = (LM_HEAD, "embed_out.weight")
LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
NOT_WEIGHTS = ("BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F64") + (
    "F8_E4M3",
    "F8_E5M2",
)


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
class Expected:
    """What a config calls for: shape by name, and names that are a copy of another if present."""

    shapes: Shapes
    tied: dict[str, str]


@dataclass(frozen=True, slots=True)
class TensorLint:
    """Tensors left out: `duplicates` must equal the tensor they copy before they may be skipped.

    `ignored`: names that a rule leaves out, sorted; `rules`: the rule of each.
    """

    duplicates: dict[str, str]
    ignored: tuple[str, ...]
    rules: dict[str, str]


def family_shapes(
    config: dict[str, Any],
    named: dict[str, Any],
    family: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> Expected:
    """What `config` calls for; `named` is the same with common keys. Raises ConfigError.

    A hostile config must not make us list parameters without end, so `tensors` bounds them.
    """
    layers = named["num_hidden_layers"]
    style = "stacked" if experts_in_one(config["model_type"]) else family.get("experts", "qwen")
    apart = named.get("n_routed_experts") or num_experts(named) if style != "stacked" else 0
    sparse = max(1, layers - (named.get("first_k_dense_replace") or 0)) if apart else layers
    at_least = sparse * (apart or 1)
    if max(at_least, layers) > len(tensors):
        raise _bad(
            f"the config calls for more than {at_least} tensors, there are {len(tensors)}",
            "config.json and the weights are of different models, or a shard is missing",
        )
    if family.get("tensors") == "model":
        return Expected(*model_shapes(config))
    shapes = expected_shapes(named, family_record(family))
    return Expected(shapes, {} if LM_HEAD in shapes else {LM_HEAD: EMBEDDING})


def family_record(family: Mapping[str, Any]) -> Family:
    """What config_keys.toml says of a family's tensors."""
    return Family(
        tied=family.get("tied", False),
        qkv_bias=family.get("qkv_bias", False),
        qk_norm=family.get("qk_norm", ""),
        fused=family.get("fused", False),
        head_dim=family.get("head_dim", 0),
        experts=family.get("experts", "qwen"),
        attention_bias=family.get("attention_bias", False),
        sinks=family.get("sinks", False),
        norms=tuple(family.get("norms", ("input_layernorm", "post_attention_layernorm"))),
    )


def tensor_problems(
    config: dict[str, Any],
    expected: Expected,
    tensors: Mapping[str, TensorInfo],
    nested: Nested | None = None,
) -> tuple[TensorLint, list[SitscError]]:
    """Check names, shapes and kinds of all tensors; of a nested decoder by the file's names."""
    if nested is not None:
        expected = _placed(expected, nested)
    shapes = dict(expected.shapes)
    duplicates = {copy: own for copy, own in expected.tied.items() if copy in tensors}
    shapes |= {copy: shapes[own] for copy, own in duplicates.items()}
    rules = {
        name: rule
        for name in sorted(set(tensors) - set(shapes))
        if (rule := ignored_by(name, config) or (ignored_part(name) if nested else None))
    }
    problems = _name_problems(shapes, tensors, rules)
    for name, shape in shapes.items():
        if name in tensors:
            problems += _tensor_problems(tensors[name], shape)
    return TensorLint(duplicates, tuple(rules), rules), problems


def _placed(expected: Expected, nested: Nested) -> Expected:
    shapes = {nested.name(name): shape for name, shape in expected.shapes.items()}
    return Expected(
        shapes, {nested.name(copy): nested.name(own) for copy, own in expected.tied.items()}
    )


def _name_problems(
    shapes: Shapes, tensors: Mapping[str, TensorInfo], rules: dict[str, str]
) -> list[SitscError]:
    """Tensors that are missing, and those that nothing calls for."""
    missing = sorted(set(shapes) - set(tensors))
    unexpected = sorted(set(tensors) - set(shapes) - set(rules))
    problems: list[SitscError] = []
    if missing and all(n.partition(".")[2] in unexpected for n in missing):
        prefix = missing[0].partition(".")[0]
        return [
            _bad(
                f"the names of all tensors lack the prefix {prefix!r}",
                "an old checkpoint: load it with transformers once and save it with "
                "model.save_pretrained(folder)",
            )
        ]
    head = next((n for n in missing if n.endswith(HEADS)), None)
    if head is not None:
        missing.remove(head)
        problems.append(
            _bad(
                f"{head} is missing and tie_word_embeddings is false",
                "fetch it, or set tie_word_embeddings to true if the model ties them",
            )
        )
    if missing:
        problems.append(
            _bad(
                f"{len(missing)} tensors are missing, first {missing[0]}",
                "config.json and the weights are of different models, or a shard is missing",
            )
        )
    if unexpected:
        problems.append(
            _bad(
                f"{len(unexpected)} unexpected tensors, first {shown(unexpected[0])}",
                "config.json does not call for them (a bias flag, more layers, another model?)",
            )
        )
    return problems


def ignored_by(name: str, config: Mapping[str, Any]) -> str | None:
    """The rule that leaves this tensor out, if there is one."""
    for rule, pattern in _ignored().items():
        if pattern.fullmatch(name):
            return rule
    extra, layers = config.get("num_nextn_predict_layers"), config["num_hidden_layers"]
    layer = LAYER.match(name)
    if type(extra) is int and layer and layers <= int(layer[1]) < layers + extra:
        return "next_token_prediction_layer"
    return None


@cache
def _ignored() -> dict[str, re.Pattern[str]]:
    """The rules of config_keys.toml; a dot is a dot there, and LAYER a number."""
    return {
        rule: re.compile(
            "|".join(p.replace(".", r"\.").replace("LAYER", r"[0-9]{1,6}") for p in patterns)
        )
        for rule, patterns in knowledge()["ignored"].items()
    }


def kind_problems(info: TensorInfo) -> list[SitscError]:
    """An error for a tensor whose stored type is none of weights."""
    if info.dtype not in NOT_WEIGHTS:
        return []
    hint = "quantised checkpoints are not read yet; give one in BF16, F16 or F32"
    if info.dtype == "F64":  # rounding could make infinities of its numbers, unseen
        hint = "store it in float32: model.float().save_pretrained(folder)"
    return [UnsupportedModelError(f"{info.name} is stored as {info.dtype}", hint=hint)]


def _tensor_problems(info: TensorInfo, shape: tuple[int, ...]) -> list[SitscError]:
    if problems := kind_problems(info):
        return problems
    if info.shape != shape:
        key = "head_dim" if "_proj" in info.name and "self_attn" in info.name else "config.json"
        return [
            _bad(
                f"{info.name} has shape {list(info.shape)}, the config calls for {list(shape)}",
                f"check {key} against the weights",
            )
        ]
    return []


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
