"""The tensors of mixture-of-experts layers as the checkpoints of each family have them.

In: a config and the family's style. Out: name and shape of a layer's tensors, without its prefix.
"qwen" names gate_proj, up_proj and down_proj of each expert, "mixtral" w1, w3 and w2, "stacked"
holds all experts in one tensor, [experts, in, out].
"""

from typing import Any

Shapes = dict[str, tuple[int, ...]]


def num_experts(config: dict[str, Any]) -> int:
    """Experts of one layer; 0 for a dense model."""
    return config.get("num_experts") or config.get("num_local_experts") or 0


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer has experts."""
    step = config.get("decoder_sparse_step") or 1
    dense = layer in (config.get("mlp_only_layers") or []) or (layer + 1) % step
    return bool(num_experts(config)) and not dense


def experts_shapes(config: dict[str, Any], style: str) -> Shapes:
    """All tensors of one layer's router, experts and shared expert."""
    hidden, count = config["hidden_size"], num_experts(config)
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    if style == "stacked":
        return _stacked(count, hidden, inner)
    if style == "mixtral":
        shapes: Shapes = {"block_sparse_moe.gate.weight": (count, hidden)}
        for expert in range(count):
            prefix = f"block_sparse_moe.experts.{expert}"
            shapes |= _three(prefix, ("w1", "w3", "w2"), hidden, inner)
        return shapes
    shapes = {"mlp.gate.weight": (count, hidden)}
    names = ("gate_proj", "up_proj", "down_proj")
    for expert in range(count):
        shapes |= _three(f"mlp.experts.{expert}", names, hidden, inner)
    if shared := config.get("shared_expert_intermediate_size"):
        shapes |= _three("mlp.shared_expert", names, hidden, shared)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _stacked(count: int, hidden: int, inner: int) -> Shapes:
    return {
        "mlp.router.weight": (count, hidden),
        "mlp.router.bias": (count,),
        "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
        "mlp.experts.down_proj": (count, inner, hidden),
        "mlp.experts.down_proj_bias": (count, hidden),
    }


def _three(prefix: str, names: tuple[str, ...], hidden: int, inner: int) -> Shapes:
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
