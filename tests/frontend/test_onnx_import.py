"""Decoders exported to ONNX, imported, through all CPU passes: logits against onnxruntime."""

from pathlib import Path

import pytest
import torch
from torch import fx

from sitsc.core.interpret import relative_error, run_graph, run_in_two, step_inputs
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.onnx_trace import trace_onnx
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from tests.frontend.onnx_models import IDS, Case, export, onnxruntime_logits

CASES = [
    Case("llama", "ids", 18, True),
    Case("llama", "full", 23, True),
    Case("llama", "past", 18, False),
    pytest.param(Case("llama", "past", 20, True), marks=pytest.mark.slow),
    Case("qwen3", "full", 18, False, "eager"),
    Case("mistral", "mask", 18, False),
    Case("gpt2", "mask", 18, False),
]


class Weights:
    """Weights of a checkpoint as the interpreter of graphs reads them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.checkpoint.read(name, (start, stop))


def _count(graph: fx.Graph, name: str) -> int:
    return sum(name in str(node.target) for node in graph.nodes if node.op == "call_function")


def _check(path: Path, layers: int, ids: list[int], window: int) -> None:
    """Import a decoder, run it in one step and in two, and compare with onnxruntime."""
    checkpoint = open_checkpoint(path)
    module = trace_onnx(checkpoint, torch.float32)
    windows = {n.args[6] for n in module.graph.nodes if "sitsc.attention" in str(n.target)}
    run_passes(module, CPU, PassContext("float32", "none", "float32", 16, "cpu"))
    graph = module.graph
    assert _count(graph, "paged_attention") == layers
    assert _count(graph, "sitsc.rms_norm") + _count(graph, "fused_linear") >= 4 * layers
    assert _count(graph, "matmul") == _count(graph, "softmax") == 0
    assert windows == {window}
    wanted = onnxruntime_logits(path, ids)
    weights = Weights(checkpoint)
    one = run_graph(graph, weights, step_inputs(graph, ids, 16))
    two = run_in_two(graph, weights, step_inputs(graph, ids, 16), 13)
    assert relative_error(one, wanted) < 2e-6
    assert relative_error(two, wanted) < 2e-6


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_exported_decoder_has_the_logits_of_onnxruntime(case: Case, tmp_path: Path):
    _check(export(case, tmp_path), 2, IDS, 7 if case.family == "mistral" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("opset", range(18, 24))
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("inputs", ["full", "past"])
def test_every_opset_of_both_exporters(inputs: str, dynamo: bool, opset: int, tmp_path: Path):
    """The older exporter knows opsets up to 20."""
    if not dynamo and opset > 20:
        pytest.skip("torch.onnx.export without dynamo ends at opset 20")
    _check(export(Case("llama", inputs, opset, dynamo), tmp_path), 2, IDS, 0)


@pytest.mark.parametrize(("family", "window"), [("llama", 0), ("mistral", 7)])
def test_what_optimum_exports(family: str, window: int):
    """Files of its exporter, with past keys and values (see write_optimum.py)."""
    path = Path(__file__).parent / "optimum" / f"{family}.onnx"
    _check(path, 1, [token % 40 for token in IDS], window)


def test_one_norm_and_rope_are_recognised_as_from_transformers(tmp_path: Path):
    checkpoint = open_checkpoint(export(Case("llama", "full", 18, False), tmp_path))
    module = trace_onnx(checkpoint, torch.float32)
    run_passes(module, CPU, PassContext("float32", "none", "float32", 16, "cpu"))
    styles = {n.args[-1] for n in module.graph.nodes if "paged_attention" in str(n.target)}
    assert styles == {"half"}
    assert not [n for n in module.graph.nodes if "rsqrt" in str(n.target)]
