"""Names and shapes of the parameters of the families that presets cover.

In: a config dict. Out: an ordered map of tensor name to shape, as a checkpoint on disk has them.
"""

from typing import Any

Shapes = dict[str, tuple[int, ...]]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def parameter_shapes(config: dict[str, Any], layers: int | None = None) -> Shapes:
    """All tensors of a checkpoint, in file order; ValueError for a family not known here."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"random weights for {family!r} are not supported; {', '.join(FAMILIES)}")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"] if layers is None else layers):
        prefix = f"model.layers.{layer}."
        block = _attention(config) | _mlp(config)
        block["input_layernorm.weight"] = block["post_attention_layernorm.weight"] = (hidden,)
        shapes |= {prefix + name: shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _attention(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    widths = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    widths["o_proj"] = (hidden, q)
    biased: set[str] = set(widths) if config.get("attention_bias") else set()
    if config["model_type"] == "qwen2":
        biased = {"q_proj", "k_proj", "v_proj"}
    shapes: Shapes = {}
    for name, shape in widths.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if name in biased:
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    if config["model_type"].startswith("qwen3"):
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _mlp(config: dict[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    if config["model_type"] != "qwen3_moe":
        return _glu("mlp.", hidden, config["intermediate_size"], bool(config.get("mlp_bias")))
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ValueError("random weights for models with some dense layers are not supported")
    shapes: Shapes = {"mlp.gate.weight": (config["num_experts"], hidden)}
    for expert in range(config["num_experts"]):
        shapes |= _glu(f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"], False)
    return shapes


def _glu(prefix: str, hidden: int, inner: int, bias: bool) -> Shapes:
    widths = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    widths["down_proj"] = (hidden, inner)
    shapes: Shapes = {}
    for name, shape in widths.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if bias:
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes
