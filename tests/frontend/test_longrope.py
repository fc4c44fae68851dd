"""Longrope: the factors of an artifact are those of its contexts, as in transformers.

Shorter contexts have the short factors and longer ones the long factors, each equal to transformers
for sequences that are on that side of the switch throughout.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sitsc.core.errors import OptionError
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
from sitsc.frontend.trace import trace
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
