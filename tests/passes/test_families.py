"""Tracing and passes of each family: the graph computes what transformers computes, throughout."""

import copy
from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import Tensor, fx

from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    step_inputs,
    tensor_shapes,
)
from sitsc.core.printer import print_graph
from sitsc.passes import CPU, CPU_INT8
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import arguments, calls, is_op
from sitsc.passes.runner import run_passes, tidy

TOKENS = 40
IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(TOKENS)]


def _context(dtype: str) -> PassContext:
    return PassContext(dtype, "none", dtype, 16, "cpu")


def _reference(config: dict[str, Any], weights: RandomTensors) -> Tensor:
    """Logits [TOKENS, vocabulary] of transformers' own model in float32."""
    import transformers  # noqa: PLC0415  (seconds)

    values = {
        k: v for k, v in copy.deepcopy(config).items() if k not in ("model_type", "torch_dtype")
    }
    parsed = transformers.AutoConfig.for_model(config["model_type"], **values)
    model = transformers.AutoModelForCausalLM.from_config(
        parsed, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in weights.shapes:
                tensor.copy_(weights.read(name, 0, tensor.shape[0]))
        return model(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_traces_and_passes_compute_what_transformers_does(family: str, traced: Any):
    module = traced(FAMILIES[family], "float32")
    weights = RandomTensors(tensor_shapes(module.graph))
    wanted = _reference(FAMILIES[family], weights)

    rows = torch.tensor([len(IDS) - 1, 3, 7])

    def error() -> float:
        inputs = step_inputs(module.graph, IDS, 16)
        some = run_graph(module.graph, weights, inputs | {"logit_rows": rows})
        whole = run_graph(module.graph, weights, step_inputs(module.graph, IDS, 16))
        return max(relative_error(whole, wanted), relative_error(some, wanted[rows]))

    assert error() < 1e-5
    run_passes(module, CPU, _context("float32"), check=True, tokens=TOKENS)
    assert error() < 1e-5
    _is_fused(module.graph, family)


def _is_fused(graph: fx.Graph, family: str) -> None:
    """Nothing that the kernels can take is left to others."""
    attention = calls(graph, "paged_attention")
    assert [arguments(node)["layer"] for node in attention] == [0, 1]
    assert all(arguments(node)["rope_style"] == "half" for node in attention)
    assert not calls(graph, "attention", "rope", "linear", "rsqrt", "silu", "gelu", "sym_size")
    linears = [arguments(node) for node in calls(graph, "fused_linear")]
    assert all(args["weight_format"] == "n16" for args in linears)
    assert len(calls(graph, "rms_norm")) == (4 if family == "qwen3" else 0)  # q and k, two layers
    apart = family == "odd_sizes"  # 50 is no multiple of the rows of a block
    assert len(calls(graph, "glu")) == (2 if apart else 0)
    assert len(linears) == 4 * 2 + 1
    assert sum(args["epilogue"] == "residual" for args in linears) == 4


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "odd_sizes"])
def test_bfloat16_is_as_close_to_float32_as_before_the_passes(family: str, traced: Any):
    module = traced(FAMILIES[family], "bfloat16")
    weights = RandomTensors(tensor_shapes(module.graph))
    rounded = _Rounded(weights)
    exact = traced(FAMILIES[family], "float32")
    wanted = run_graph(exact.graph, rounded, step_inputs(exact.graph, IDS, 16))

    def error() -> float:
        return relative_error(
            run_graph(module.graph, weights, step_inputs(module.graph, IDS, 16)), wanted
        )

    before = error()
    run_passes(module, CPU, _context("bfloat16"))
    assert error() < 1.5 * before


class _Rounded:
    """Weights rounded to bfloat16, given as float32."""

    def __init__(self, weights: RandomTensors) -> None:
        self.weights = weights

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.weights.read(name, start, stop).bfloat16().float()


@pytest.mark.parametrize("family", ["llama_tied", "phi3_partial", "odd_sizes", "qwen2"])
def test_int8_changes_little_and_only_where_it_should(family: str, traced: Any):
    module = traced(FAMILIES[family], "float32")
    reports = run_passes(module, CPU_INT8, _context("float32"), check=True)
    errors = {report.name: report.error or 0.0 for report in reports}
    assert 1e-4 < errors.pop("quantise_int8") < 0.05
    assert max(errors.values()) < 1e-5
    for node in calls(module.graph, "fused_linear"):
        args = arguments(node)
        assert args["weight"].meta["weight"].dtype == "int8"
        assert args["scale"].meta["weight"].sources == args["weight"].meta["weight"].sources


@pytest.mark.parametrize("family", ["llama_tied", "odd_sizes", "phi3_partial", "qwen3", "gemma"])
def test_every_pass_is_idempotent(family: str, traced: Any):
    module = traced(FAMILIES[family], "bfloat16")
    graph, context = module.graph, _context("bfloat16")
    for item in CPU_INT8:
        item.run(graph, context)
        tidy(graph)
        once = print_graph(graph)
        item.run(graph, context)
        tidy(graph)
        assert print_graph(graph) == once, item.name


def test_all_passes_twice_change_nothing(traced: Any):
    module = traced(FAMILIES["llama"], "float32")
    run_passes(module, CPU, _context("float32"))
    once = print_graph(module.graph)
    run_passes(module, CPU, _context("float32"))
    assert print_graph(module.graph) == once


def test_the_table_is_stored_once_when_tied(traced: Any):
    module = traced(FAMILIES["llama_tied"], "bfloat16")
    run_passes(module, CPU, _context("bfloat16"))
    tables = [n for n in module.graph.nodes if n.meta.get("weight") and "embed" in n.name]
    assert len(tables) == 1
    assert all(is_op(user, "packed_embedding", "fused_linear") for user in tables[0].users)
    assert len(tables[0].users) == 2
