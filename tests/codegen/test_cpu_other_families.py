"""Families without an entry, compiled for the CPU: prefill, then decode past the window."""

from pathlib import Path
from typing import Any

import pytest
from family_packages import FamilyPackage
from test_cpu_families import CONTEXT, IDS, Compiled, _check, libraries
from torch import Tensor, fx

from sitsc.core.interpret import RandomTensors, tensor_shapes
from sitsc.passes import CPU
from sitsc.passes.runner import run_passes
from tests.family_reference import reference_logits, transformers_model
from tests.other_families import small_config

__all__ = ["libraries"]
KINDS = ("afmoe", "arcee", "cohere2", "ernie4_5_moe", "exaone4", "glm4_moe", "minicpm3") + (
    "hunyuan_v1_dense",
    "minimax_m2",
    "nanochat",
    "nemotron",
    "olmo",
    "opt",
    "persimmon",
    "phi",
)


@pytest.mark.slow
def test_families_that_nobody_prepared(traced: Any, libraries: Any, tmp_path: Path):
    graphs: dict[str, fx.Graph] = {}
    weights: dict[str, RandomTensors] = {}
    wanted: dict[str, list[Tensor]] = {}
    for kind in KINDS:
        config = small_config(kind)
        module = traced(config, "float32")
        weights[kind] = RandomTensors(tensor_shapes(module.graph))
        model = transformers_model(config, module.graph, weights[kind])
        wanted[kind] = [reference_logits(model, ids) for ids in IDS]
        run_passes(module, CPU, CONTEXT)
        graphs[kind] = module.graph
    _check(Compiled(FamilyPackage(graphs, weights, tmp_path / "others.pt2"), wanted, graphs))
