"""Tracing: what a graph says of its inputs, and models that are refused in one line."""

from typing import Any

import pytest
import torch

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.weights import materialise
from sitsc.frontend.longrope import longrope_switch
from sitsc.frontend.trace import trace
from sitsc.models.presets import preset

_TINY = {k: v for k, v in preset("tiny-llama").items() if k not in ("architectures", "torch_dtype")}


def test_placeholders_are_step_inputs_or_weights_by_checkpoint_name(traced: Any):
    graph = traced(preset("tiny-llama-tied"), "bfloat16").graph
    nodes = graph.find_nodes(op="placeholder")
    inputs = {n.meta["input"]: n.meta["dims"] for n in nodes if "input" in n.meta}
    assert inputs == {
        "token_ids": ("tokens",),
        "position_ids": ("tokens",),
        "logit_rows": ("rows",),
    }
    weights = {n.meta["weight"].name: n.meta["weight"] for n in nodes if "weight" in n.meta}
    assert "model.embed_tokens.weight" in weights
    assert "lm_head.weight" not in weights  # tied: one placeholder
    assert weights["model.layers.1.self_attn.k_proj.weight"].shape == (32, 64)
    assert {spec.dtype for spec in weights.values() if spec.role == "weight"} == {"bfloat16"}
    frequencies = weights["model.rotary_emb.inv_freq"]
    assert (frequencies.role, frequencies.dtype) == ("constant", "float32")


def test_layers_are_alike_and_names_are_stable(traced: Any):
    graph = traced(preset("tiny-llama"), "float32").graph
    attention = [n for n in graph.nodes if n.target is torch.ops.sitsc.attention.default]
    assert [n.args[4] for n in attention] == [0, 1]


def _refused(**changes: Any) -> str:
    with pytest.raises(UnsupportedModelError) as error:
        trace(_TINY | changes, torch.float32)
    text = str(error.value)
    assert "\n" not in text
    return text


def test_attention_of_its_own_is_refused():
    """ALiBi is added inside of the model's own attention, which would be lost."""
    text = _refused(model_type="bloom", n_layer=2, n_head=4)
    assert "attention of its own" in text and "ALiBi" in text


def test_tables_that_depend_on_the_batch_are_refused():
    text = _refused(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert "cannot trace 'llama'" in text or "as it runs" in text


def test_longrope_keeps_its_short_factors_up_to_its_switch():
    changes: dict[str, Any] = {"model_type": "phi3", "pad_token_id": 0}
    changes |= {"original_max_position_embeddings": 32}
    factors = {"short_factor": [2.0] * 8, "long_factor": [4.0] * 8}
    changes["rope_scaling"] = {"rope_type": "longrope", **factors}
    config = _TINY | changes
    assert (longrope_switch(config), longrope_switch(_TINY)) == (32, None)
    graph = trace(config, torch.float32).graph
    specs = [n.meta["weight"] for n in graph.nodes if "weight" in n.meta]
    (spec,) = (spec for spec in specs if spec.name.endswith("inv_freq"))
    inv_freq = materialise(spec, lambda name, start, stop: torch.empty(0))
    assert float(inv_freq[0]) == 0.5  # one over the first short factor


@pytest.mark.parametrize("kind", ["no_such_family", "t5", None])
def test_unknown_families_are_refused(kind: Any):
    assert "cannot be built" in _refused(model_type=kind)


def test_values_of_a_wrong_kind_are_refused():
    assert "cannot be built" in _refused(model_type="llama", hidden_size="wide")
    assert "cannot be built" in _refused(model_type="phi3", head_dim=None, pad_token_id=0)


def test_sizes_that_do_not_fit_are_refused():
    assert "cannot be built" in _refused(model_type="llama", pad_token_id=5000)
