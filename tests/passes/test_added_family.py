"""StableLM, the family of docs/add-a-model-family.md: traced and lowered, it is transformers'."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    step_inputs,
    tensor_shapes,
)
from sitsc.frontend.config_lint import lint_config
from sitsc.frontend.trace import trace
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import arguments, calls
from sitsc.passes.runner import run_passes

IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(40)]
BASE: dict[str, Any] = {
    "model_type": "stablelm",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "a quarter of the head rotates when the key is absent": {},
    "half of the head": {"partial_rotary_factor": 0.5},
    "biases of q, k and v": {"use_qkv_bias": True},
    "norms of each head": {"qk_layernorm": True},
    "parallel residual": {"use_parallel_residual": True},
}


def reference(config: dict[str, Any], weights: RandomTensors) -> Tensor:
    """Logits [tokens, vocabulary] of transformers' own model."""
    import transformers  # noqa: PLC0415  (seconds)

    values = {k: v for k, v in copy.deepcopy(config).items() if k != "model_type"}
    parsed = transformers.AutoConfig.for_model("stablelm", **values)
    model = transformers.AutoModelForCausalLM.from_config(
        parsed, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(weights.read(name, 0, tensor.shape[0]))
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_stablelm_is_what_transformers_computes(variant: str):
    config = BASE | VARIANTS[variant]
    lint_config(config)
    module = trace(config, torch.float32)
    weights = RandomTensors(tensor_shapes(module.graph))
    wanted = reference(config, weights)
    run_passes(module, CPU, PassContext("float32", "none", "float32", 16, "cpu"))
    found = run_graph(module.graph, weights, step_inputs(module.graph, IDS, 16))
    assert relative_error(found, wanted) < 1e-5
    attention = [arguments(node) for node in calls(module.graph, "paged_attention")]
    assert len(attention) == 2
