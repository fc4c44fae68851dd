"""The pipeline of text encoders: checkpoint or ONNX graph → module → plain artifact, tokenizer in.

Imports the passes and so is imported late. The artifact maps token ids and a mask to vectors.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sitsc.core.artifact import Artifact, ArtifactWriter
from sitsc.core.errors import OptionError
from sitsc.core.options import CompileOptions
from sitsc.frontend.checkpoint import Checkpoint
from sitsc.frontend.encoder import load_encoder
from sitsc.frontend.module import trace_plain
from sitsc.plain_pipeline import check_plain_options, compile_plain

_EXAMPLE = (3, 12)


def compile_encoder(
    checkpoint: Checkpoint,
    writer: ArtifactWriter,
    options: CompileOptions,
    progress: Callable[[str, float], None],
    dump: Path | None = None,
) -> Artifact:
    """Compile an encoder into the artifact of `writer`, which has its tokenizer already."""
    check_plain_options(options)
    if options.dtype not in ("auto", "float32"):
        raise OptionError(f"--dtype {options.dtype}: encoders compute in float32", hint="leave it")
    progress("trace", 0.0)
    module = load_encoder(checkpoint, frozenset(options.allow_unknown_keys))
    ids = torch.ones(_EXAMPLE, dtype=torch.int64)
    batch = torch.export.Dim("batch", min=1)
    tokens = torch.export.Dim("tokens", min=1, max=module.pooling.max_tokens)
    shape: dict[int, Any] = {0: batch, 1: tokens}
    shapes = {"input_ids": shape, "attention_mask": shape}
    plain = trace_plain(module, (ids, torch.ones_like(ids)), {}, shapes)
    names = checkpoint.config.get("architectures") or ["Encoder"]
    return compile_plain(replace(plain, name=str(names[0])), writer, options, progress, dump)
