"""Families that nobody prepared: a folder of each equals transformers, or is refused by name.

CI opens all and computes some; `pytest -m slow` computes all, and compiles several for the CPU.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from sitsc.core.errors import SitscError, UnsupportedModelError
from sitsc.core.interpret import relative_error, run_graph, run_in_two, step_inputs
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.config_lint import lint_config
from sitsc.frontend.lint import ERROR, lint_checkpoint
from sitsc.frontend.trace import trace
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from sitsc.passes.unmatched import unmatched_kind
from tests.family_reference import reference_logits
from tests.other_families import EQUAL, REFUSED, saved, small_config, table

DOC = Path(__file__).parents[2] / "docs" / "families.md"
IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(40)]
TOLERANCE = 1e-5
CI_EQUAL, CI_REFUSED = (
    ("arcee", "exaone", "granitemoe", "mimo_v2_flash", "phimoe"),
    ("falcon", "mpt", "llama4_text"),
)


def check_equal(kind: str, root: Path) -> None:
    """A folder opened, traced and lowered, in one step and in two; what is left is as listed."""
    folder, model = saved(kind, root)
    wanted = reference_logits(model, IDS)
    weights = Opened(open_checkpoint(folder))
    assert [f for f in lint_checkpoint(weights.checkpoint).findings if f.level == ERROR] == []
    module = trace(weights.checkpoint.config, torch.float32)
    assert weights.read_by(module.graph) == set(weights.checkpoint.tensors)
    run_passes(module, CPU, PassContext("float32", "none", "float32", 16, "cpu"))
    graph, inputs = module.graph, step_inputs(module.graph, IDS, 16)
    assert relative_error(run_graph(graph, weights, inputs), wanted) < TOLERANCE
    two = run_in_two(graph, weights, step_inputs(graph, IDS, 16), 26)
    assert relative_error(two, wanted) < TOLERANCE
    left = {found for node in graph.nodes if (found := unmatched_kind(node))}
    assert left == set(EQUAL[kind])


class Opened:
    """The weights of an opened checkpoint, as graphs read them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.checkpoint.read(name, (start, stop))

    def read_by(self, graph: fx.Graph) -> set[str]:
        specs = [node.meta["weight"] for node in graph.nodes if "weight" in node.meta]
        return {source.tensor for spec in specs for source in spec.sources}


def check_refused(kind: str) -> None:
    """Tracing alone refuses it, whatever the lint said before."""
    with pytest.raises(UnsupportedModelError) as error:
        trace(small_config(kind), torch.float32)
    assert REFUSED[kind] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", CI_EQUAL)
def test_a_family_without_an_entry_is_equal(kind: str, tmp_path: Path):
    check_equal(kind, tmp_path)


@pytest.mark.parametrize("kind", CI_REFUSED)
def test_a_family_that_is_not_understood_is_refused(kind: str):
    check_refused(kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in EQUAL if kind not in CI_EQUAL])
def test_the_others_are_equal(kind: str, tmp_path: Path):
    check_equal(kind, tmp_path)


@pytest.mark.parametrize("kind", EQUAL)
def test_a_folder_of_each_is_opened(kind: str, tmp_path: Path):
    folder, _ = saved(kind, tmp_path)
    assert [f for f in lint_checkpoint(open_checkpoint(folder)).findings if f.level == ERROR] == []


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
