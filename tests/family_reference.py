"""Logits of transformers' own model of a configuration, from the weights that a graph reads."""

import copy
from typing import Any

import torch
from torch import Tensor, fx

from sitsc.core.interpret import RandomTensors
from sitsc.core.weights import WeightSpec, materialise
from sitsc.frontend.checkpoint_names import renamed


def transformers_model(config: dict[str, Any], graph: fx.Graph, weights: RandomTensors) -> Any:
    """The model in float32 with the weights of `graph`, which is as traced."""
    import transformers  # noqa: PLC0415  (seconds)

    values = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    parsed = transformers.AutoConfig.for_model(config["model_type"], **values)
    model = transformers.AutoModelForCausalLM.from_config(
        parsed, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).eval()
    specs = {n.meta["weight"].name: n.meta["weight"] for n in graph.nodes if "weight" in n.meta}
    filled: set[int] = set()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            spec = specs.get(name) or specs.get(renamed(name, config["model_type"]))
            if spec is not None:
                tensor.copy_(_as_there(spec, materialise(spec, weights.read), tensor))
                filled.add(tensor.data_ptr())
            assert tensor.data_ptr() in filled, f"{name} is neither a weight of ours nor tied"
    return model


def reference_logits(model: Any, ids: list[int]) -> Tensor:
    """Logits [ids, vocabulary] of one sequence."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def _as_there(spec: WeightSpec, value: Tensor, like: Tensor) -> Tensor:
    """A weight of ours in the shape of transformers' parameter."""
    part = spec.sources[0].part
    if "even" in part:  # gate and up in turn, and transposed where they are matrices
        pairs = value.view(-1, 2, *value.shape[1:]).movedim(1, 2).flatten(1, 2)
        return pairs.transpose(-1, -2) if "transposed" in part else pairs
    return value.transpose(-1, -2) if "transposed" in part else value.reshape(like.shape)
