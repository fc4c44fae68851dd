"""Checkpoints of mixture-of-experts models compiled and run as users do, against transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sitsc.core.interpret import relative_error
from sitsc.core.options import CompileOptions
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import compile_model, inspect, plan_checkpoint
from sitsc.runtime.loader import load
from sitsc.runtime.score import iterate_logits

IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(45)]
OPTIONS: dict[str, Any] = {"max_context": 64, "max_batch": 4, "prefill_chunk_tokens": 16}


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-gpt-oss"])
def test_logits_of_the_artifact_are_those_of_transformers(name: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = write_random(name, tmp_path / "model", dtype="float32")
    options = CompileOptions(dtype="float32", **OPTIONS)
    session = load(compile_model(model, tmp_path / "artifact", options).root)
    ours = torch.cat(list(iterate_logits(session.executor, IDS)))
    theirs = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        wanted = theirs(torch.tensor([IDS])).logits[0]
    assert relative_error(ours, wanted) < 1e-5


def test_the_plan_of_a_large_model_counts_active_experts(tmp_path: Path):
    model = write_random("qwen3-30b-a3b", tmp_path / "model", headers_only=True)
    options = CompileOptions(max_context=4096, max_batch=8)
    plan = plan_checkpoint(inspect(model, options), options).plan
    assert 60e9 < plan.memory.weights_bytes < 62e9
    (one,) = (r for r in plan.regimes if r.name == "decode_1")
    rows = [k for k in one.kernels if k.op == "sitsc.moe"]
    expert = 3 * 768 * 2048 * 2
    assert sum(row.count for row in rows) == 48 and all(row.by == "kernel" for row in rows)
    assert 8 * expert * 48 < sum(row.bytes for row in rows) < 8.1 * expert * 48
    (many,) = (r for r in plan.regimes if r.name == "decode_8")
    nbytes = sum(k.bytes for k in many.kernels if k.op == "sitsc.moe")
    assert 50 * expert * 48 < nbytes < 53 * expert * 48
