"""Mixture-of-experts families: what is traced and executed equals transformers, router included."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sitsc import lowering
from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    step_inputs,
    tensor_shapes,
)
from sitsc.core.ops.moe import experts_dense, experts_reference, route_reference
from sitsc.core.options import CompileOptions
from sitsc.models.presets import preset
from sitsc.passes import CPU, CPU_INT8
from sitsc.passes.base import PassContext
from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.cost import active_experts
from sitsc.passes.fxutil import arguments, calls
from sitsc.passes.match_router import MatchRouter
from sitsc.passes.runner import run_passes, tidy
from tests.compiled_families import FAMILIES
from tests.family_reference import reference_logits, transformers_model

TOKENS = 40
IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(TOKENS)]
CONTEXT = PassContext("float32", "none", "float32", 16, "cpu")
ROUTERS = {
    "mixtral": ("softmax", 2, 1),
    "qwen3_moe": ("softmax", 3, 1),
    "qwen2_moe": ("softmax", 3, 0),
    "gpt_oss": ("softmax_chosen", 3, 0),
}
DEEPSEEK = FAMILIES["deepseek_v3"]


@pytest.mark.parametrize("family", ROUTERS)
def test_traces_and_passes_compute_what_transformers_does(family: str, traced: Any):
    module = traced(FAMILIES[family], "float32")
    weights = RandomTensors(tensor_shapes(module.graph))
    wanted = reference_logits(transformers_model(FAMILIES[family], module.graph, weights), IDS)

    rows = torch.tensor([len(IDS) - 1, 3, 7])

    def error() -> float:
        inputs = step_inputs(module.graph, IDS, 16)
        some = run_graph(module.graph, weights, inputs | {"logit_rows": rows})
        whole = run_graph(module.graph, weights, step_inputs(module.graph, IDS, 16))
        return max(relative_error(whole, wanted), relative_error(some, wanted[rows]))

    assert error() < 1e-5
    run_passes(module, CPU, CONTEXT, check=True, tokens=TOKENS)
    assert error() < 1e-5
    found = [arguments(node) for node in calls(module.graph, "moe")]
    assert [(a["scoring"], a["top_k"], a["normalise"]) for a in found] == 2 * [ROUTERS[family]]
    assert all(a["weight_format"] == "n16" for a in found)
    assert not calls(module.graph, "experts", "topk", "softmax")
    shared = family == "qwen2_moe"  # its shared expert comes between
    assert all((a["residual"] is None) == shared for a in found)


def test_routers_with_groups_and_corrections_are_known(traced: Any):
    module = traced(DEEPSEEK, "float32")
    weights = RandomTensors(tensor_shapes(module.graph))
    wanted = reference_logits(transformers_model(DEEPSEEK, module.graph, weights), IDS)
    for item in (Canonicalise(), MatchRouter()):
        item.run(module.graph, CONTEXT)
        tidy(module.graph)
    (node,) = calls(module.graph, "moe")
    a = arguments(node)
    kinds = ("scoring", "top_k", "groups", "group_top", "normalise", "scaling")
    assert [a[kind] for kind in kinds] == ["sigmoid", 3, 4, 2, 1, 2.5]
    out = run_graph(module.graph, weights, step_inputs(module.graph, IDS, 16))
    assert relative_error(out, wanted) < 1e-5


@pytest.mark.parametrize("family", ROUTERS)
def test_int8_leaves_the_router_exact(family: str, traced: Any):
    module = traced(FAMILIES[family], "float32")
    reports = run_passes(module, CPU_INT8, CONTEXT, check=True)
    errors = {report.name: report.error or 0.0 for report in reports}
    assert 1e-4 < errors.pop("quantise_int8") < 0.5  # an expert may change where scores are close
    assert max(errors.values()) < 1e-5
    for node in calls(module.graph, "moe"):
        a = arguments(node)
        assert arguments(a["logits"])["weight"].meta["weight"].dtype == "float32"
        for name in ("gate_up", "down"):
            spec, scale = a[name].meta["weight"], a[f"{name}_scale"].meta["weight"]
            assert (spec.dtype, scale.sources) == ("int8", spec.sources)


def test_every_expert_comes_from_tensors_of_its_own(traced: Any):
    graph = traced(FAMILIES["mixtral"], "float32").graph
    specs = {n.meta["weight"].name: n.meta["weight"] for n in graph.nodes if "weight" in n.meta}
    prefix = "model.layers.1.block_sparse_moe.experts."
    spec = specs["model.layers.1.mlp.experts.gate_up_proj"]
    wanted = [f"{prefix}{i}.{w}.weight" for i in range(4) for w in ("w1", "w3")]
    assert [source.tensor for source in spec.sources] == wanted
    assert spec.shape == (8, 48, 64)
    assert "model.layers.1.block_sparse_moe.gate.weight" in specs


def test_an_unknown_router_stays(traced: Any):
    module = traced(FAMILIES["qwen2_moe"], "float32")
    for node in calls(module.graph, "topk"):
        node.args = (node.args[0], node.args[1], -1, False)  # the worst experts
    MatchRouter().run(module.graph, CONTEXT)
    assert len(calls(module.graph, "experts")) == 2


@given(
    tokens=st.integers(1, 9),
    experts=st.integers(1, 7),
    hidden=st.integers(1, 20),
    inter=st.integers(1, 20),
    clamped=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dense_experts_are_the_same(
    tokens: int, experts: int, hidden: int, inter: int, clamped: bool, seed: int
):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weights, indices = route_reference(
        random(tokens, experts), None, min(2, experts), "softmax", 1, 1, 1, 1.5
    )
    activation = ("swiglu_clamped", 1.7, 0.5) if clamped else ("silu", 0.0, 0.0)
    args: tuple[Any, ...] = (
        random(tokens, hidden),
        indices,
        weights,
        random(2 * experts, inter, hidden),
        random(2 * experts, inter),
        random(experts, hidden, inter),
        random(experts, hidden),
        *activation,
    )
    assert relative_error(experts_dense(*args), experts_reference(*args)) < 1e-5


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "tiny-mixtral"])
def test_a_check_of_bfloat16_passes_is_not_misled_by_close_scores(name: str):
    options = CompileOptions(dtype="bfloat16")
    dtypes = lowering.resolve_dtypes(preset(name), options)
    lowering.check_passes(preset(name), dtypes, options)


def test_distinct_experts_of_a_batch():
    assert active_experts(128, 8, 1) == pytest.approx(8)
    assert 50 < active_experts(128, 8, 8) < 52
    assert active_experts(8, 8, 1) == 8
