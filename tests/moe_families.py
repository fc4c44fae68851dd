"""Tiny mixture-of-experts configurations, and what transformers computes from the same weights."""

import copy
from typing import Any

import torch
from torch import Tensor, fx

from sitsc.core.interpret import RandomTensors
from sitsc.core.weights import WeightSpec, materialise

_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 128,
    "rope_theta": 150000.0,
}


def _family(model_type: str, **changes: Any) -> dict[str, Any]:
    config = _BASE | {"model_type": model_type} | changes
    return {key: value for key, value in config.items() if value is not None}


MOE: dict[str, dict[str, Any]] = {
    "mixtral": _family("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _family(
        "qwen3_moe",
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        decoder_sparse_step=1,
    ),
    "qwen2_moe": _family(
        "qwen2_moe",
        head_dim=None,
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    ),
    "gpt_oss": _family(
        "gpt_oss",
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=12,
        num_experts_per_tok=4,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=_YARN,
    ),
}
DEEPSEEK = _family(
    "deepseek_v3",
    head_dim=None,
    num_key_value_heads=4,
    n_routed_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=40,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)


def reference(
    config: dict[str, Any], graph: fx.Graph, weights: RandomTensors, ids: list[int]
) -> Tensor:
    """Logits [ids, vocabulary] of transformers' own model in float32; `graph` is as traced."""
    import transformers  # noqa: PLC0415  (seconds)

    values = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    parsed = transformers.AutoConfig.for_model(config["model_type"], **values)
    model = transformers.AutoModelForCausalLM.from_config(
        parsed, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    specs = {n.meta["weight"].name: n.meta["weight"] for n in graph.nodes if "weight" in n.meta}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            on_disk = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
            spec = specs[name if name in specs else on_disk]
            tensor.copy_(_as_there(spec, materialise(spec, weights.read), tensor))
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def _as_there(spec: WeightSpec, value: Tensor, like: Tensor) -> Tensor:
    """A weight of ours in the shape of transformers' parameter."""
    part = spec.sources[0].part
    if "even" in part:  # gate and up in turn, and transposed where they are matrices
        pairs = value.view(-1, 2, *value.shape[1:]).movedim(1, 2).flatten(1, 2)
        return pairs.transpose(-1, -2) if "transposed" in part else pairs
    return value.transpose(-1, -2) if "transposed" in part else value.reshape(like.shape)
