"""Lint of ONNX files: what every key, initializer and operator is to the compiler.

In: the path of a model, opened. Out: a `LintReport`. A decoder is traced as for a compile, since
the graph alone decides what is computed; no weight is read.
"""

from collections import Counter
from pathlib import Path

import torch

from sitsc.core.errors import SitscError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.encoder import is_encoder, read_pooling, unknown_inputs
from sitsc.frontend.lint import ERROR, WARNING, Finding, KeyUse, LintReport
from sitsc.frontend.onnx_checkpoint import MODEL, json_beside
from sitsc.frontend.onnx_program import Program, dtype_of
from sitsc.frontend.onnx_trace import trace_onnx
from sitsc.frontend.safe_files import shown
from sitsc.frontend.tokenizer_lint import tokenizer_problems

# What is read of a config.json beside a graph (see `onnx_checkpoint` and `lowering.model_facts`).
CONSUMED = ("architectures", "max_position_embeddings", "model_type", "n_positions", "vocab_size")
CONSUMED += ("bos_token_id", "eos_token_id", "rope_parameters", "rope_scaling")
UNUSED = "no node reads it"


def is_onnx(path: str | Path) -> bool:
    """Whether a model is an ONNX file, or a folder of one, by its name."""
    return Path(path).suffix == ".onnx" or (Path(path) / MODEL).exists()


def refused(path: str | Path, error: UnsupportedModelError) -> LintReport:
    """The report of a file that cannot be opened for what its graph asks for."""
    finding = Finding(ERROR, error.what, error.where or Path(path).name, error.hint)
    return LintReport("onnx", (), {}, {}, (finding,))


def lint_onnx(checkpoint: Checkpoint) -> LintReport:
    """All findings about an ONNX file that could be opened."""
    program: Program = checkpoint.program
    counts, left_out = _initializers(program)
    problems: list[SitscError] = []
    warnings: list[str] = []
    try:
        if is_encoder(checkpoint):
            problems += unknown_inputs(program)
            read_pooling(checkpoint.root, 1 << 20)
        else:
            compute = torch.float32 if dtype_of(program) == "float32" else torch.bfloat16
            trace_onnx(checkpoint, compute)
            errors, warnings = tokenizer_problems(checkpoint)
            problems += errors
    except SitscError as error:
        problems.append(error)
    findings = [Finding(ERROR, e.what, e.where, e.hint) for e in problems]
    findings += [Finding(WARNING, text) for text in warnings]
    kind = str(checkpoint.config["model_type"])
    return LintReport(kind, _keys(checkpoint), counts, left_out, tuple(findings))


def _keys(checkpoint: Checkpoint) -> tuple[KeyUse, ...]:
    """Keys of config.json; those that say what the graph says itself are inert."""
    written = json_beside(checkpoint.root, "config.json")
    return tuple(
        KeyUse(key, shown(value), "consumed" if key in CONSUMED else "inert")
        for key, value in sorted(written.items())
    )


def _initializers(program: Program) -> tuple[dict[str, int], dict[str, str]]:
    """use → how many, and initializer → why it is left out. Tied: read by several nodes."""
    read = {name for step in program.steps for name in step.inputs} | set(program.file.outputs)
    weights: Counter[str] = Counter()
    for name in (name for step in program.steps for name in step.inputs):
        if name in program.weights:
            weights[program.weights[name].tensor.name] += 1
    counts: Counter[str] = Counter()
    left_out: dict[str, str] = {}
    for name in program.file.tensors:
        if weights[name] > 1:
            counts["tied"] += 1
        elif weights[name]:
            counts["consumed"] += 1
        elif name in read:
            counts["constant"] += 1
        else:
            counts[f"ignored: {UNUSED}"] += 1
            left_out[name] = UNUSED
    return dict(counts), left_out
