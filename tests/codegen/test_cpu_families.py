"""Every family compiled for the CPU equals transformers: prefill, then decode past its window.

Families are compiled together, into one package for the features of CI and one for the others. What
the passes leave is checked too: nothing of the listed families runs as operators of aten that a
kernel could have taken.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from family_packages import FamilyPackage
from packages import PAGE_TOKENS, Part, load_libraries, pools, step
from torch import Tensor, fx

from sitsc.core.interpret import RandomTensors, relative_error, tensor_shapes
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from sitsc.passes.unmatched import unmatched_kind
from tests.compiled_families import FAMILIES
from tests.family_reference import reference_logits, transformers_model

LENGTHS = (40, 7)
PAGES = ([6, 10, 2], [9])
IDS = [[(7 * i * i + 3 * i + k) % 250 for i in range(n)] for k, n in enumerate(LENGTHS)]
PREFILL = 33  # of the longer sequence, more than twice the window; the rest token by token
TOLERANCE = 1e-5
CONTEXT = PassContext("float32", "none", "float32", PAGE_TOKENS, "cpu")
# One family at least for each feature: the others are compiled by `pytest -m slow`.
CI = (
    "llama3_scaled",  # scaled rope
    "qwen3_yarn",  # norms of heads, attention factor
    "gemma2",  # window, softcaps, norms after, offset of the norm's weight
    "gemma3",  # rope by layer type
    "phi3_longrope",  # longrope, partial rotation, fused layers
    "gpt2",  # layer norm, weights of [columns, rows], learned positions, GELU by formula
    "gpt_neox",  # parallel residual, partial rotation
    "cohere",  # layer norm by hand, over heads too, interleaved rope
    "glm4",  # partial interleaved rope
    "smollm3",  # layers without rope
    "qwen3_moe",  # experts whose shares add up to 1
    "gpt_oss",  # experts with biases, sinks, clamped activation, rope of halves
    "deepseek_v3",  # latent attention, shared experts, groups of experts
)

GATES = {"qwen2_moe": ["aten.sigmoid.default"] * 2}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A package of families, and what transformers computes for each sequence of each."""

    package: FamilyPackage
    wanted: dict[str, list[Tensor]]
    graphs: dict[str, fx.Graph]


@pytest.fixture(scope="module")
def libraries() -> Any:
    return load_libraries()


def _compile(families: tuple[str, ...], traced: Any, folder: Path) -> Compiled:
    graphs: dict[str, fx.Graph] = {}
    weights: dict[str, RandomTensors] = {}
    wanted: dict[str, list[Tensor]] = {}
    for family in families:
        module = traced(FAMILIES[family], "float32")
        weights[family] = RandomTensors(tensor_shapes(module.graph))
        model = transformers_model(FAMILIES[family], module.graph, weights[family])
        wanted[family] = [reference_logits(model, ids) for ids in IDS]
        run_passes(module, CPU, CONTEXT)
        graphs[family] = module.graph
    return Compiled(FamilyPackage(graphs, weights, folder / "families.pt2"), wanted, graphs)


@pytest.fixture(scope="module")
def compiled(traced: Any, libraries: Any, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return _compile(CI, traced, tmp_path_factory.mktemp("families"))


def _check(compiled: Compiled) -> None:
    """Both sequences in one step; then the longer in a step and token by token beside the other."""
    whole = compiled.package.run(
        step([Part(i, 0, p) for i, p in zip(IDS, PAGES, strict=True)])
        | pools(compiled.package.graph, 13)
    )
    kv = pools(compiled.package.graph, 13)
    got = [compiled.package.run(step([Part(IDS[0][:PREFILL], 0, PAGES[0])]) | kv)]
    others: list[dict[str, Tensor]] = []
    for turn in range(LENGTHS[1]):
        places = ((0, PREFILL + turn), (1, turn))
        parts = [Part([IDS[k][at]], at, PAGES[k]) for k, at in places]
        both = compiled.package.run(step(parts) | kv)
        got.append({family: logits[:1] for family, logits in both.items()})
        others.append({family: logits[1:] for family, logits in both.items()})
    errors = {}
    for family, wanted in compiled.wanted.items():
        one = torch.cat([part[family] for part in got])
        other = torch.cat([part[family] for part in others])
        pairs = [*zip(whole[family].split(LENGTHS), wanted, strict=True)]
        pairs += [(one, wanted[0]), (other, wanted[1])]
        errors[family] = max(relative_error(*pair) for pair in pairs)
        assert torch.equal(one[:PREFILL], whole[family][:PREFILL]), f"{family}: not alone"
    print({family: f"{error:.1e}" for family, error in errors.items()})
    assert not {family: error for family, error in errors.items() if not error < TOLERANCE}


def test_prefill_and_decode_equal_transformers(compiled: Compiled):
    _check(compiled)


def test_nothing_is_left_unmatched(compiled: Compiled):
    left = {
        family: [str(node.target) for node in graph.nodes if unmatched_kind(node)]
        for family, graph in compiled.graphs.items()
    }
    for family, names in GATES.items():  # one value a token, beside a whole expert
        assert left.get(family, names) == names
        left.pop(family, None)
    assert not {family: names for family, names in left.items() if names}


@pytest.mark.slow
def test_the_other_families(traced: Any, libraries: Any, tmp_path: Path):
    others = _compile(tuple(f for f in FAMILIES if f not in CI), traced, tmp_path)
    test_nothing_is_left_unmatched(others)
    _check(others)
