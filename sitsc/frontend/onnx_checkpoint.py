"""An ONNX file as a checkpoint: its weights under the names of plans, and what its folder tells.

In: the path of a .onnx file. Out: a `Checkpoint` with `program`, the graph to be traced. A
config.json beside it gives limits and ids of tokens; the graph alone decides what is computed.
"""

from pathlib import Path
from typing import Any

import torch

from sitsc.core.errors import CheckpointError, OptionError
from sitsc.core.options import CompileOptions
from sitsc.core.weights import dtype_name
from sitsc.frontend.checkpoint_types import Checkpoint, Rows, TensorInfo
from sitsc.frontend.onnx_file import open_onnx_file
from sitsc.frontend.onnx_program import (
    LINEAR,
    OnnxWeight,
    Program,
    dtype_of,
    logits_index,
    make_program,
)
from sitsc.frontend.safe_files import read_json_object
from sitsc.frontend.tokenizer_files import read_tokenizer_files

MODEL = "model.onnx"


def open_onnx(path: Path) -> Checkpoint:
    """Open a .onnx file. Raises CheckpointError, UnsupportedModelError."""
    root = path.parent
    program = make_program(open_onnx_file(root, path.name))
    config = json_beside(root, "config.json")
    generation = json_beside(root, "generation_config.json")
    weights = program.plan_names()
    return Checkpoint(
        root=root,
        format="onnx",
        config=config | _facts(program, config),
        generation_config=generation,
        tensors={name: _info(name, weight) for name, weight in weights.items()},
        tokenizer=read_tokenizer_files(root, config, generation),
        reader=lambda name, rows: _read(weights[name], rows),
        program=program,
    )


def json_beside(root: Path, name: str) -> dict[str, Any]:
    """A JSON file of the model's folder; nothing where there is none. Raises CheckpointError."""
    return read_json_object(root, name) if (root / name).exists() else {}


def _facts(program: Program, config: dict[str, Any]) -> dict[str, Any]:
    """What the graph says, in words of a config. Half precision is computed in float32."""
    kept = dtype_of(program)
    facts: dict[str, Any] = {"dtype": "float32" if kept == "float16" else kept}
    if not config.get("model_type"):
        facts |= {"model_type": "onnx", "architectures": ["ONNX"]}
    if not isinstance(config.get("vocab_size"), int):
        facts["vocab_size"] = _vocabulary(program)
    return facts


def _vocabulary(program: Program) -> int:
    """The width of the logits: as the output says, else that of the last linear layer."""
    if width := program.file.widths[logits_index(program)]:
        return width
    layers = [step for step in program.steps if step.op == LINEAR]
    return program.weights[layers[-1].inputs[1]].shape[0] if layers else 0


def _info(name: str, weight: OnnxWeight) -> TensorInfo:
    tensor = weight.tensor
    dtype = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    kind = dtype.get(dtype_name(weight.dtype), dtype_name(weight.dtype))
    file = "" if tensor.file is None else tensor.file.name
    return TensorInfo(name, kind, weight.shape, tensor.nbytes, file)


def _read(weight: OnnxWeight, rows: Rows) -> torch.Tensor:
    """Rows of a weight as the graph uses it."""
    start, stop = rows if rows is not None else (0, weight.shape[0])
    return weight.read(start, stop)


def half_dtype(program: Program, compute: torch.dtype) -> torch.dtype:
    """The dtype in which half precision is computed. Raises OptionError.

    A float32 graph is what it is: narrowing it would round between any two operators.
    """
    stored = dtype_of(program)
    if stored == "float32" and compute != torch.float32:
        raise OptionError(
            f"--dtype {dtype_name(compute)}: the ONNX graph computes in float32",
            hint="leave --dtype out, or export the model in half precision",
        )
    return compute


def check_context(positions: int, options: CompileOptions, max_context: int) -> None:
    """Raises OptionError for a context beyond the table of positions in the graph."""
    if positions and max_context > positions:
        raise OptionError(
            f"a context of {max_context} is beyond the graph's {positions} positions",
            hint=f"--max-context {positions}" if not options.max_context else "give less",
        )


def check_vocabulary(width: int, config: dict[str, Any]) -> None:
    """Raises CheckpointError when the config is of another model than the graph."""
    if width != config["vocab_size"]:
        raise CheckpointError(
            f"the graph gives {width} logits where vocab_size is {config['vocab_size']}",
            where="config.json",
            hint="config.json belongs to another model",
        )
