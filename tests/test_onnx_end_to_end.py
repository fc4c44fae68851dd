"""A decoder exported to ONNX, compiled and run, against onnxruntime and transformers."""

from pathlib import Path

import torch

from sitsc.core.interpret import relative_error
from sitsc.core.options import CompileOptions
from sitsc.pipeline import compile_model
from sitsc.runtime.loader import load
from sitsc.runtime.score import iterate_logits
from tests.frontend.onnx_models import IDS, Case, export, make_model, onnxruntime_logits

CASE = Case("llama", "past", 18, False)


def test_logits_of_the_artifact_are_those_of_onnxruntime_and_transformers(tmp_path: Path):
    path = export(CASE, tmp_path / "model")
    options = CompileOptions(max_context=64, max_batch=2, prefill_chunk_tokens=16)
    made = compile_model(path.parent, tmp_path / "artifact", options)
    assert made.plan.kind == "decoder" and made.plan.numerics.dtype == "float32"
    assert made.plan.kv[0].kv_heads == 2  # repeated heads are not stored
    ours = torch.cat(list(iterate_logits(load(made.root).executor, IDS)))
    with torch.no_grad():
        theirs = make_model(CASE)(torch.tensor([IDS])).logits[0]
    assert relative_error(ours, onnxruntime_logits(path, IDS)) < 1e-5
    assert relative_error(ours, theirs) < 1e-5
