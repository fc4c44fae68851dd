"""Mixture-of-experts layers: one operator a layer when tracing, and where their weights come from.

In: a transformers model. Out: the function that takes the place of its experts, and for each
stacked parameter its canonical shape and the checkpoint tensors that it is made of.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.ops.moe import CLAMPED
from sitsc.core.ranges import Cut
from sitsc.core.weights import STACKED, TensorSlice
from sitsc.frontend.checkpoint_names import expert_names, experts_in_one, renamed

_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "GELUActivation": "gelu_erf",
    "ReLU": "relu",
    "SiLU": "silu",
}


@dataclass(frozen=True, slots=True)
class Stacked:
    """A parameter that holds all experts: its canonical shape and what it is made of."""

    shape: tuple[int, ...]
    sources: tuple[TensorSlice, ...]


def experts(module: Any, hidden_states: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """transformers' experts interface, ending in one operator a layer.

    The parameters are passed as the module has them; `bind` gives them their canonical shape.
    """
    activation, alpha, limit = _activation(module)
    return torch.ops.sitsc.experts(
        hidden_states,
        indices,
        weights,
        module.gate_up_proj,
        module.gate_up_proj_bias if module.has_bias else None,
        module.down_proj,
        module.down_proj_bias if module.has_bias else None,
        activation,
        alpha,
        limit,
    )


def _activation(module: Any) -> tuple[str, float, float]:
    """Name, alpha and limit of what lies between the products. Raises UnsupportedModelError."""
    kind = type(module).__name__
    if not module.has_gate or module.has_post_expert_norm:
        raise UnsupportedModelError(f"experts of kind {kind} are not known")
    own = type(module)._apply_gate.__qualname__
    if own == "GptOssExperts._apply_gate":
        return CLAMPED, float(module.alpha), float(module.limit)
    name = _ACTIVATIONS.get(type(module.act_fn).__name__)
    if name is None or "_default_apply_gate" not in own:
        raise UnsupportedModelError(
            f"experts of kind {kind} have an activation that is not known: "
            f"{own if name else type(module.act_fn).__name__}"
        )
    return name, 0.0, 0.0


def _is_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "gate_up_proj")


def stacked_parameters(model: Any) -> dict[str, Stacked]:
    """Every parameter of the experts of `model`, by its name there."""
    kind, found = model.config.model_type, {}
    for path, module in model.named_modules():
        if _is_experts(module):
            if module.has_bias:
                parts = _in_memory(path, module)
            elif experts_in_one(kind):
                parts = _in_one(path, module, kind)
            else:
                parts = _on_disk(path, module, kind)
            found |= {f"{path}.{name}": stacked for name, stacked in parts.items()}
    return found


def _sizes(module: Any) -> tuple[int, int, int]:
    """Experts, intermediate and hidden size."""
    count, one, other = module.down_proj.shape
    return (count, one, other) if module.is_transposed else (count, other, one)


def _on_disk(path: str, module: Any, kind: str) -> dict[str, Stacked]:
    """Checkpoints with tensors of their own for each expert."""
    count, inter, hidden = _sizes(module)
    if module.is_transposed or not module.is_concatenated:
        raise UnsupportedModelError(f"the layout of {type(module).__name__} is not known")
    prefix, (gate, up, down) = renamed(f"{path}.", kind), expert_names(kind)

    def pieces(names: tuple[str, ...], rows: int) -> tuple[TensorSlice, ...]:
        return tuple(
            TensorSlice(f"{prefix}{expert}.{name}.weight", 0, rows)
            for expert in range(count)
            for name in names
        )

    return {
        "gate_up_proj": Stacked((2 * count, inter, hidden), pieces((gate, up), inter)),
        "down_proj": Stacked((count, hidden, inter), pieces((down,), hidden)),
    }


def _in_one(path: str, module: Any, kind: str) -> dict[str, Stacked]:
    """Checkpoints with one tensor for all experts: [experts, out, in], gate above up."""
    count, inter, hidden = _sizes(module)
    if module.is_transposed or not module.is_concatenated:
        raise UnsupportedModelError(f"the layout of {type(module).__name__} is not known")

    def pieces(name: str, rows: int, parts: int) -> tuple[TensorSlice, ...]:
        bounds = [(part * rows, (part + 1) * rows) for part in range(parts)]
        words = [f"{STACKED} {Cut(-2, (pair,), parts * rows).word}" for pair in bounds]
        tensor = renamed(f"{path}.{name}", kind)
        return tuple(
            TensorSlice(tensor, expert, expert + 1, word)
            for expert in range(count)
            for word in words
        )

    return {
        "gate_up_proj": Stacked((2 * count, inter, hidden), pieces("gate_up_proj", inter, 2)),
        "down_proj": Stacked((count, hidden, inter), pieces("down_proj", hidden, 1)),
    }


def _in_memory(path: str, module: Any) -> dict[str, Stacked]:
    """Checkpoints that stack as the module does: [experts, in, out], gate and up in turn."""
    count, inter, hidden = _sizes(module)
    if not module.is_transposed or module.is_concatenated:
        raise UnsupportedModelError(f"the layout of {type(module).__name__} is not known")

    def pieces(name: str, parts: tuple[str, ...]) -> tuple[TensorSlice, ...]:
        return tuple(
            TensorSlice(f"{path}.{name}", expert, expert + 1, part)
            for expert in range(count)
            for part in parts
        )

    turns = ("even", "odd")
    both = tuple(f"transposed {turn}" for turn in turns)
    return {
        "gate_up_proj": Stacked((2 * count, inter, hidden), pieces("gate_up_proj", both)),
        "gate_up_proj_bias": Stacked((2 * count, inter), pieces("gate_up_proj_bias", turns)),
        "down_proj": Stacked((count, hidden, inter), pieces("down_proj", ("transposed",))),
        "down_proj_bias": Stacked((count, hidden), pieces("down_proj_bias", ("",))),
    }
