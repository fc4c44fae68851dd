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


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """`interleaved`: q and k rows are in the order of the converter, not in that of HF.

    `norm_plus_one`: norms are stored as 1 + w. `factors`: top tensors that hold rope factors.
    `partial`: the rotary width may be less than the head's. `window`: sliding_window is read.
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
