"""Families that nobody prepared: each equals transformers or is refused by name.

CI tries some; `pytest -m slow` tries all and compiles several into a package for the CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from sitsc.core.errors import SitscError, UnsupportedModelError
from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    run_in_two,
    step_inputs,
    tensor_shapes,
)
from sitsc.frontend.config_lint import lint_config
from sitsc.frontend.trace import trace
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from sitsc.passes.unmatched import unmatched_kind
from tests.family_reference import reference_logits, transformers_model
from tests.other_families import EQUAL, REFUSED, small_config, table

DOC = Path(__file__).parents[2] / "docs" / "families.md"
IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(40)]
TOLERANCE = 1e-5
CI_EQUAL, CI_REFUSED = ("arcee", "exaone4", "olmo"), ("falcon", "mpt", "llama4_text")


def check_equal(kind: str) -> None:
    """Traced, lowered, in one step and in two, past the window; what is left is as listed."""
    config = small_config(kind)
    lint_config(config)
    module = trace(config, torch.float32)
    weights = RandomTensors(tensor_shapes(module.graph))
    wanted = reference_logits(transformers_model(config, module.graph, weights), IDS)
    run_passes(module, CPU, PassContext("float32", "none", "float32", 16, "cpu"))
    graph, inputs = module.graph, step_inputs(module.graph, IDS, 16)
    assert relative_error(run_graph(graph, weights, inputs), wanted) < TOLERANCE
    two = run_in_two(graph, weights, step_inputs(graph, IDS, 16), 26)
    assert relative_error(two, wanted) < TOLERANCE
    left = {found for node in graph.nodes if (found := unmatched_kind(node))}
    assert left == set(EQUAL[kind])


def check_refused(kind: str) -> None:
    """Tracing alone refuses it, whatever the lint said before."""
    with pytest.raises(UnsupportedModelError) as error:
        trace(small_config(kind), torch.float32)
    assert REFUSED[kind] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", CI_EQUAL)
def test_a_family_without_an_entry_is_equal(kind: str):
    check_equal(kind)


@pytest.mark.parametrize("kind", CI_REFUSED)
def test_a_family_that_is_not_understood_is_refused(kind: str):
    check_refused(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in EQUAL if kind not in CI_EQUAL])
def test_the_others_are_equal(kind: str):
    check_equal(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in REFUSED if kind not in CI_REFUSED])
def test_the_others_are_refused(kind: str):
    check_refused(kind)


def test_the_document_shows_what_is_tested():
    assert table() in DOC.read_text(), "docs/families.md: put tests.other_families.table() there"


def test_keys_that_a_family_calls_otherwise_are_checked():
    config: dict[str, Any] = small_config("gptj")
    lint_config(config)
    with pytest.raises(SitscError, match="num_attention_heads = 0"):
        lint_config(config | {"n_head": 0})
