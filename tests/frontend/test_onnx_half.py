"""Half precision graphs: computed in float32 by default, in bfloat16 when asked for."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from sitsc.core.interpret import relative_error, run_graph, step_inputs
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.onnx_trace import trace_onnx
from tests.frontend.onnx_models import IDS, Case, export, onnxruntime_logits
from tests.frontend.test_onnx_import import Weights


@pytest.fixture(scope="module")
def narrowed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A float32 graph, and the same with all its floats in float16."""
    wide = export(Case("llama", "full", 18, False), tmp_path_factory.mktemp("wide"))
    model = onnx.load(wide)
    tensors = [*model.graph.initializer]
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == 1:
                attribute.i = 10
            if attribute.name == "value":
                tensors.append(attribute.t)
    for tensor in tensors:
        if tensor.data_type == 1:
            value = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    path = tmp_path_factory.mktemp("narrow") / "model.onnx"
    onnx.save(model, path)
    return wide, path


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_is_computed_as_asked(narrowed, dtype: torch.dtype, limit: float):
    wide, path = narrowed
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["dtype"] == "float32"
    graph = trace_onnx(checkpoint, dtype).graph
    found = run_graph(graph, Weights(checkpoint), step_inputs(graph, IDS, 16))
    assert relative_error(found, onnxruntime_logits(wide, IDS)) < limit
