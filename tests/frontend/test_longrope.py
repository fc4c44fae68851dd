"""Longrope: the factors of an artifact are those of its contexts, as in transformers.

Shorter contexts have the short factors and longer ones the long factors, each equal to transformers
for sequences that are on that side of the switch throughout.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sitsc.core.errors import ConfigError, OptionError, UnsupportedModelError
from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    run_in_two,
    step_inputs,
    tensor_shapes,
)
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.config_lint import lint_config
from sitsc.frontend.longrope import SWITCH as KEY
from sitsc.frontend.longrope import longrope_switch
from sitsc.frontend.trace import build_model, trace
from sitsc.lowering import model_facts
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from sitsc.pipeline import inspect
from tests.compiled_families import FAMILIES
from tests.family_reference import reference_logits, transformers_model

CONFIG = FAMILIES["phi3_longrope"]
SWITCH = 64


def ids(count: int) -> list[int]:
    return [(7 * i * i + 3 * i + 1) % 250 for i in range(count)]


def test_a_context_past_the_switch_is_taken_only_when_asked_for(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = open_checkpoint(tmp_path)
    assert model_facts(checkpoint, CompileOptions()).tokens.max_context == SWITCH
    longer = CompileOptions(max_context=SWITCH + 1)
    assert model_facts(checkpoint, longer).tokens.max_context == SWITCH + 1
    with pytest.raises(OptionError, match="beyond the model's 512 positions"):
        model_facts(checkpoint, CompileOptions(max_context=513))
    said: list[str] = []
    inspect(tmp_path, CompileOptions(max_context=SWITCH), said.append)
    assert not any("longrope" in text for text in said)
    inspect(tmp_path, longer, said.append)
    assert any("65 is past position 64, where longrope changes its factors" in s for s in said)


@pytest.mark.parametrize(("context", "count"), [(0, SWITCH), (512, SWITCH + 1), (512, 100)])
def test_both_sides_of_the_switch_are_what_transformers_computes(context: int, count: int):
    """In one step and in two: what is kept in the pages was rotated by the same factors."""
    module = trace(CONFIG, torch.float32, context)
    weights = RandomTensors(tensor_shapes(module.graph))
    model: Any = transformers_model(CONFIG, module.graph, weights)
    wanted = reference_logits(model, ids(count))
    run_passes(module, CPU, PassContext("float32", "none", "float32", 16, "cpu"))
    whole = run_graph(module.graph, weights, step_inputs(module.graph, ids(count), 16))
    assert relative_error(whole, wanted) < 1e-5
    two = run_in_two(module.graph, weights, step_inputs(module.graph, ids(count), 16), 30)
    assert relative_error(two, wanted) < 1e-5


def test_a_short_sequence_of_a_long_context_has_the_long_factors():
    """What the warning says, and that the two sets differ at all."""
    weights = RandomTensors(tensor_shapes(trace(CONFIG, torch.float32).graph))
    both = [
        run_graph(graph, weights, step_inputs(graph, ids(40), 16))
        for graph in (trace(CONFIG, torch.float32, c).graph for c in (SWITCH, SWITCH + 1))
    ]
    assert relative_error(*both) > 1e-3


def test_the_switch_is_where_transformers_has_it():
    """Its classes read the key at the top first, and Phi-3's has 4096 there if it is left out."""
    llama = {k: v for k, v in FAMILIES["llama"].items() if k != "rope_theta"}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {k: v for k, v in CONFIG["rope_parameters"].items() if k != KEY}
    plain = {"rope_type": "longrope", "rope_theta": 1e4} | factors
    for config, switch in (
        (CONFIG, SWITCH),
        (CONFIG | {KEY: 32}, 32),
        (CONFIG | {"rope_parameters": rope}, SWITCH),
        (llama | {"rope_parameters": plain}, 512),
        (llama | {"rope_parameters": plain | {KEY: 128}}, 128),
    ):
        lint_config(config)
        model: Any = build_model(config, torch.float32)
        assert longrope_switch(config) == switch == model.config.rope_parameters[KEY]
    for value, message in ((None, "beside its rope settings"), ("64", "a whole number")):
        with pytest.raises(ConfigError, match=f"{KEY} = .*{message}"):
            lint_config(CONFIG | {KEY: value})
    with pytest.raises(ConfigError, match="a whole number"):
        lint_config(llama | {"rope_parameters": plain | {KEY: 64.0}})


def test_longrope_of_some_layers_and_with_scales_of_its_own_is_refused():
    full = {"rope_type": "longrope", "rope_theta": 1e6, KEY: 64}
    full |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    both = FAMILIES["gemma3"]["rope_parameters"] | {"full_attention": full}
    with pytest.raises(UnsupportedModelError, match="depend on the whole batch"):
        trace(FAMILIES["gemma3"] | {"rope_parameters": both}, torch.float32)
    left_out = ("head_dim", "rope_theta")
    experts = {k: v for k, v in FAMILIES["mixtral"].items() if k not in left_out}
    scaled = full | {"short_mscale": 1.1, "long_mscale": 1.2}
    with pytest.raises(UnsupportedModelError, match="short_mscale and long_mscale"):
        trace(experts | {"model_type": "phimoe", "rope_parameters": scaled}, torch.float32)
