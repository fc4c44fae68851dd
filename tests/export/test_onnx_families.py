"""Final graphs of every kind of decoder as ONNX models: onnxruntime against the graph, and back.

Prefill, then token by token past the window; the file is checked by onnx and imported again.
"""

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    run_in_two,
    step_inputs,
    tensor_shapes,
)
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.onnx_trace import trace_onnx
from sitsc.passes import CPU, CPU_INT8, CUDA
from sitsc.passes.base import PassContext
from sitsc.passes.runner import run_passes
from sitsc.passes.unmatched import unmatched_kind
from tests.compiled_families import FAMILIES
from tests.export.onnx_runs import Runner, Weights, write_decoder

IDS = [(7 * i * i + 3 * i) % 250 for i in range(40)]
CONTEXT = PassContext("float32", "none", "float32", 16, "cpu")
# One family at least for each operator and option of one; the others by `pytest -m slow`.
CI = ("gemma2", "gemma3", "gpt2", "phi3", "qwen3_yarn", "cohere", "glm4")
CI += ("qwen3_moe", "gpt_oss", "deepseek_v3")
BACK = ("gemma2", "gpt_oss", "deepseek_v3")  # imported again in CI: importing takes seconds


def _check(traced: Any, family: str, folder: Path, *, back: bool) -> None:
    module = traced(FAMILIES[family], "float32")
    weights = RandomTensors(tensor_shapes(module.graph))
    run_passes(module, CPU, CONTEXT)
    wanted = run_graph(module.graph, weights, step_inputs(module.graph, IDS, 16))
    path = write_decoder(module.graph, weights, folder / "model.onnx")
    onnx.checker.check_model(str(path), full_check=True)
    runner = Runner.of(path)
    assert relative_error(runner.step([IDS])[0], wanted) < 1e-5
    assert relative_error(runner.decode(IDS, 33), wanted) < 1e-5
    if not back:
        return
    checkpoint = open_checkpoint(path)
    again = trace_onnx(checkpoint, torch.float32)
    run_passes(again, CPU, CONTEXT)
    found = run_in_two(again.graph, Weights(checkpoint), step_inputs(again.graph, IDS, 16), 23)
    assert relative_error(found, wanted) < 1e-5
    assert not [str(node.target) for node in again.graph.nodes if unmatched_kind(node)]


@pytest.mark.parametrize("family", CI)
def test_logits_are_those_of_the_graph(traced: Any, family: str, tmp_path: Path):
    _check(traced, family, tmp_path, back=family in BACK)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in BACK])
def test_all_families_come_back(traced: Any, family: str, tmp_path: Path):
    _check(traced, family, tmp_path, back=True)


def test_padding_on_the_left_changes_nothing(traced: Any, tmp_path: Path):
    """Two sequences of one batch, as generation with attention_mask has them."""
    module = traced(FAMILIES["gemma3"], "float32")
    weights = RandomTensors(tensor_shapes(module.graph))
    run_passes(module, CPU, CONTEXT)
    runner = Runner.of(write_decoder(module.graph, weights, tmp_path / "model.onnx"), batch=2)
    short = IDS[5:25]
    alone = run_graph(module.graph, weights, step_inputs(module.graph, short, 16))
    whole = run_graph(module.graph, weights, step_inputs(module.graph, IDS[:30], 16))
    mask = [[0] * 10 + [1] * 20, [1] * 30]
    places = [[0] * 10 + list(range(20)), list(range(30))]
    cut = [row[:28] for row in mask], [row[:28] for row in places]
    first = runner.step([([9] * 10 + short)[:28], IDS[:28]], *cut)
    ends = [row[28:] for row in places]
    last = runner.step([short[18:], IDS[28:30]], mask, ends)
    assert relative_error(first[0, 10:], alone[:18]) < 1e-5
    assert relative_error(last[0], alone[18:]) < 1e-5
    assert relative_error(torch.cat((first[1], last[1])), whole) < 1e-5


@pytest.mark.parametrize(("dtype", "passes"), [("bfloat16", CPU), ("float32", CPU_INT8)])
def test_half_precision_and_int8_keep_their_weights(
    traced: Any, dtype: str, passes: Any, tmp_path: Path
):
    """Weights are stored as they are and widened by the graph, which computes in float32."""
    int8 = passes is CPU_INT8
    config = FAMILIES["qwen3_moe" if int8 else "gemma2"]
    module = traced(config, dtype)
    weights = RandomTensors(tensor_shapes(module.graph))
    run_passes(module, passes, PassContext(dtype, "int8" if int8 else "none", dtype, 16, "cpu"))
    path = write_decoder(module.graph, weights, tmp_path / "model.onnx", dtype)
    wanted = run_graph(module.graph, weights, step_inputs(module.graph, IDS, 16))
    found = Runner.of(path).decode(IDS, 33)
    assert relative_error(found, wanted) < (1e-5 if int8 else 8e-2)  # bfloat16 rounds
    kinds = {tensor.data_type for tensor in onnx.load(str(path)).graph.initializer}
    assert (3 if int8 else 16) in kinds
    if not int8:
        checkpoint = open_checkpoint(path)
        assert checkpoint.config["dtype"] == "float32"
        again = trace_onnx(checkpoint, torch.float32)
        back = run_graph(again.graph, Weights(checkpoint), step_inputs(again.graph, IDS, 16))
        assert relative_error(back, found) < 1e-5


@pytest.mark.parametrize("family", ["llama3_scaled", "gpt_oss"])
def test_graphs_of_gpu_targets(traced: Any, family: str, tmp_path: Path):
    """As they are planned for an H200: rope tables, bfloat16, weights as checkpoints have them."""
    module = traced(FAMILIES[family], "bfloat16")
    weights = RandomTensors(tensor_shapes(module.graph))
    run_passes(module, CUDA, PassContext("bfloat16", "none", "bfloat16", 16, "h200"))
    path = write_decoder(module.graph, weights, tmp_path / "model.onnx", "bfloat16")
    wanted = run_graph(module.graph, weights, step_inputs(module.graph, IDS, 16))
    assert relative_error(Runner.of(path).decode(IDS, 33), wanted) < 8e-2
