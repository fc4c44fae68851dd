"""Names and shapes of the parameters of the families that presets cover.

In: a config dict. Out: an ordered map of tensor name to shape, as a checkpoint on disk has them.
"""

from typing import Any

Shapes = dict[str, tuple[int, ...]]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral") + (
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "phi3",
    "deepseek_v3",
)
_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")


def parameter_shapes(config: dict[str, Any], layers: int | None = None) -> Shapes:
    """All tensors of a checkpoint, in file order; ValueError for a family not known here."""
    family = config.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"random weights for {family!r} are not supported; {', '.join(FAMILIES)}")
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"] if layers is None else layers):
        prefix = f"model.layers.{layer}."
        block = _attention(config) | _mlp(config, layer)
        norms = _GEMMA_NORMS if family.startswith("gemma") else _NORMS
        block |= {f"{norm}.weight": (hidden,) for norm in norms}
        shapes |= {prefix + name: shape for name, shape in block.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _attention(config: dict[str, Any]) -> Shapes:
    if config["model_type"] == "deepseek_v3":
        return _latent_attention(config)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    q, kv = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    widths = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    if config["model_type"] == "phi3":
        widths = {"qkv_proj": (q + 2 * kv, hidden)}
    widths["o_proj"] = (hidden, q)
    default = config["model_type"] == "gpt_oss"
    biased: set[str] = set(widths) if config.get("attention_bias", default) else set()
    if config["model_type"] in ("qwen2", "qwen2_moe"):
        biased = {"q_proj", "k_proj", "v_proj"}
    shapes: Shapes = {}
    for name, shape in widths.items():
        shapes[f"self_attn.{name}.weight"] = shape
        if name in biased:
            shapes[f"self_attn.{name}.bias"] = shape[:1]
    if config["model_type"] == "gpt_oss":
        shapes["self_attn.sinks"] = (heads,)
    if config["model_type"].startswith(("qwen3", "gemma3")):
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (head_dim,)
    return shapes


def _latent_attention(config: dict[str, Any]) -> Shapes:
    """DeepSeek's: q, and k with v, pass through narrow layers."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value = config["v_head_dim"]
    return {
        "self_attn.q_a_proj.weight": (q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (plain + rotated), q_rank),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rotated, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (plain + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }


def _deepseek_mlp(config: dict[str, Any], layer: int) -> Shapes:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    if layer < config["first_k_dense_replace"]:
        return _glu("mlp.", hidden, config["intermediate_size"], False)
    count = config["n_routed_experts"]
    shapes: Shapes = {"mlp.gate.weight": (count, hidden)}
    shapes["mlp.gate.e_score_correction_bias"] = (count,)
    for expert in range(count):
        shapes |= _glu(f"mlp.experts.{expert}.", hidden, inner, False)
    shared = inner * config["n_shared_experts"]
    return shapes | _glu("mlp.shared_experts.", hidden, shared, False)


def _mlp(config: dict[str, Any], layer: int) -> Shapes:
    hidden = config["hidden_size"]
    if config["model_type"] == "deepseek_v3":
        return _deepseek_mlp(config, layer)
    if config["model_type"] == "phi3":
        inner = config["intermediate_size"]
        return {
            "mlp.gate_up_proj.weight": (2 * inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
    if config["model_type"] == "mixtral":
        return _mixtral(config)
    if config["model_type"] == "gpt_oss":
        return _gpt_oss(config)
    if config["model_type"] not in ("qwen2_moe", "qwen3_moe"):
        return _glu("mlp.", hidden, config["intermediate_size"], bool(config.get("mlp_bias")))
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise ValueError("random weights for models with some dense layers are not supported")
    shapes: Shapes = {"mlp.gate.weight": (config["num_experts"], hidden)}
    for expert in range(config["num_experts"]):
        shapes |= _glu(f"mlp.experts.{expert}.", hidden, config["moe_intermediate_size"], False)
    if config["model_type"] == "qwen2_moe":
        shared = config["shared_expert_intermediate_size"]
        shapes |= _glu("mlp.shared_expert.", hidden, shared, False)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _mixtral(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes: Shapes = {"block_sparse_moe.gate.weight": (config["num_local_experts"], hidden)}
    for expert in range(config["num_local_experts"]):
        prefix = f"block_sparse_moe.experts.{expert}."
        shapes |= {f"{prefix}{name}.weight": (inner, hidden) for name in ("w1", "w3")}
        shapes[f"{prefix}w2.weight"] = (hidden, inner)
    return shapes


def _gpt_oss(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    count = config["num_local_experts"]
    return {
        "mlp.router.weight": (count, hidden),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, inner, hidden),
        "mlp.experts.down_proj_bias": (count, hidden),
    }


def _glu(prefix: str, hidden: int, inner: int, bias: bool) -> Shapes:
    widths = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden)}
    widths["down_proj"] = (hidden, inner)
    shapes: Shapes = {}
    for name, shape in widths.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if bias:
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes
