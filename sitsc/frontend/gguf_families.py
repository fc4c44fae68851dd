"""What differs between the GGUF architectures that we read, as data.

In: `general.architecture`. Out: `GgufFamily`: the Hugging Face family, names of its tensors, and
what the converter did to their values. Layouts follow the public converter of llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_down": "mlp.down_proj",
}
APART = BLOCK_NAMES | {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
}
NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FUSED = BLOCK_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
NORMS_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NORMS_AFTER = {name: APART[name] for name in APART if name not in ("attn_norm", "ffn_norm")} | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Tensors of all experts, [experts, out, in]; the number of one stands in the braces.
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SPARSE = {"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": []}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """`interleaved`: q and k rows are in the order of the converter, not in that of HF.

    `norm_plus_one`: norms are stored as 1 + w. `factors`: top tensors that hold rope factors.
    `partial`: the rotary width may be less than the head's. `window`: sliding_window is read.
    `experts`: names of stacked tensors. `numbers`: key → (metadata, value when it is absent).
    `pattern`: every so many layers one sees all tokens, the others a window. `large`: the number
    of layers of the one size whose attention scale is not that of head_dim.
    """

    model_type: str
    architecture: str
    layer_names: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict)
    factors: tuple[str, ...] = ()
    biases: bool = False
    interleaved: bool = False
    norm_plus_one: bool = False
    partial: bool = False
    window: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    pattern: int = 0
    large: int = 0


# What a file of architecture "llama" is when it has experts.
MIXTRAL = GgufFamily(
    "mixtral",
    "MixtralForCausalLM",
    APART | {"ffn_gate_inp": "block_sparse_moe.gate"},
    {"hidden_act": "silu", "sliding_window": None},
    interleaved=True,
    experts=MIXTRAL_EXPERTS,
)

FAMILIES = {
    "llama": GgufFamily(
        "llama",
        "LlamaForCausalLM",
        APART,
        {"hidden_act": "silu"},
        factors=(ROPE_FACTORS,),
        biases=True,
        interleaved=True,
    ),
    "qwen2": GgufFamily(
        "qwen2", "Qwen2ForCausalLM", APART, {"hidden_act": "silu", "use_sliding_window": False}
    ),
    "qwen3": GgufFamily(
        "qwen3",
        "Qwen3ForCausalLM",
        APART | NORMS_OF_HEADS,
        {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    ),
    "gemma": GgufFamily(
        "gemma",
        "GemmaForCausalLM",
        APART,
        {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
        norm_plus_one=True,
    ),
    "gemma2": GgufFamily(
        "gemma2",
        "Gemma2ForCausalLM",
        APART | NORMS_AROUND,
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        norm_plus_one=True,
        numbers={
            "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": ("final_logit_softcapping", 30.0),
        },
        pattern=2,
        large=46,
    ),
    "gemma3": GgufFamily(
        "gemma3_text",
        "Gemma3ForCausalLM",
        APART | NORMS_AROUND | NORMS_OF_HEADS,
        {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        norm_plus_one=True,
        numbers={"final_logit_softcapping": ("final_logit_softcapping", None)},
        pattern=6,
        large=62,
    ),
    "qwen2moe": GgufFamily(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        APART | ROUTER | SHARED_EXPERT,
        _SPARSE | {"norm_topk_prob": False, "use_sliding_window": False},
        experts=EXPERTS,
    ),
    "qwen3moe": GgufFamily(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        APART | NORMS_OF_HEADS | ROUTER,
        _SPARSE | {"norm_topk_prob": True, "use_sliding_window": False, "attention_bias": False},
        experts=EXPERTS,
    ),
    "olmo2": GgufFamily(
        "olmo2",
        "Olmo2ForCausalLM",
        NORMS_AFTER | NORMS_OF_HEADS,
        {"hidden_act": "silu", "attention_bias": False},
    ),
    "granite": GgufFamily(
        "granite",
        "GraniteForCausalLM",
        APART,
        {"hidden_act": "silu"},
        biases=True,
        interleaved=True,
        numbers={
            "attention_multiplier": ("attention.scale", None),
            "embedding_multiplier": ("embedding_scale", 1.0),
            "residual_multiplier": ("residual_scale", 1.0),
            "logits_scaling": ("logit_scale", 1.0),
        },
    ),
    "phi3": GgufFamily(
        "phi3",
        "Phi3ForCausalLM",
        FUSED,
        {"hidden_act": "silu", "attention_bias": False, "pad_token_id": None},
        factors=(LONG_FACTORS, SHORT_FACTORS),
        partial=True,
        window=True,
    ),
}
