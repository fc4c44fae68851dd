"""Mixture-of-experts models compiled to a package: prefill and decode equal transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from packages import PAGE_TOKENS, Package, Part, load_libraries, pools, step

from sitsc.core.interpret import RandomTensors, relative_error, tensor_shapes
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from tests.moe_families import MOE, reference

LENGTHS = (40, 7)
PAGES = ([6, 10, 2], [9])
IDS = [[(7 * i * i + 3 * i + k) % 250 for i in range(n)] for k, n in enumerate(LENGTHS)]
CONTEXT = PassContext("float32", "none", "float32", PAGE_TOKENS, "cpu")


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_libraries(tmp_path_factory.mktemp("libraries"))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_prefill_and_decode(family: str, traced: Any, libraries: Any, tmp_path: Path):
    module = traced(MOE[family], "float32")
    weights = RandomTensors(tensor_shapes(module.graph))
    wanted = [reference(MOE[family], module.graph, weights, ids) for ids in IDS]
    run_passes(module, CPU, CONTEXT)
    package = Package(module.graph, weights, tmp_path / "step.pt2")
    kv = pools(module.graph, 13)
    whole = package.run(step([Part(i, 0, p) for i, p in zip(IDS, PAGES, strict=True)]) | kv)
    for got, want in zip(whole.split(LENGTHS), wanted, strict=True):
        assert relative_error(got, want) < 1e-5
    kv, got = pools(module.graph, 13), []
    got.append(package.run(step([Part(IDS[0][:33], 0, PAGES[0])]) | kv))
    for turn in range(7):  # the shorter one begins beside the longer one, token by token
        parts = [Part([IDS[k][at]], at, PAGES[k]) for k, at in ((0, 33 + turn), (1, turn))]
        both = package.run(step(parts) | kv)
        got.append(both[:1])
        assert relative_error(both[1:], wanted[1][turn : turn + 1]) < 1e-5
    joined = torch.cat(got)
    assert relative_error(joined, wanted[0]) < 1e-5
    assert torch.equal(joined[:33], whole[:33])  # whoever is beside a token does not matter
