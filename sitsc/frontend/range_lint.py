"""The dtype asked for against the numbers of the checkpoint.

In: a checkpoint and a dtype. Out: what storing the weights in it would lose. Headers say which
tensors must be looked at; those are read a block of rows at a time and only when asked.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sitsc.core.errors import SitscError, UnsupportedModelError
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.tensor_lint import NOT_WEIGHTS

LARGEST = {
    "float16": torch.finfo(torch.float16).max,
    "bfloat16": torch.finfo(torch.bfloat16).max,
    "float32": torch.finfo(torch.float32).max,
}
STORED_LARGEST = {"F16": LARGEST["float16"], "BF16": LARGEST["bfloat16"], "F32": LARGEST["float32"]}
STORED = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Overflow:
    """A tensor with a number that the dtype cannot hold, and its largest magnitude."""

    name: str
    largest: float


def wider_tensors(checkpoint: Checkpoint, dtype: str) -> list[str]:
    """Tensors stored in a type with more range than `dtype`."""
    limit = LARGEST[dtype]
    return [
        name
        for name, info in checkpoint.tensors.items()
        if STORED_LARGEST.get(info.dtype, LARGEST["float32"]) > limit
    ]


def overflows(checkpoint: Checkpoint, dtype: str) -> Iterator[Overflow]:
    """Tensors whose numbers overflow `dtype`, infinities and NaN included; reads the weights."""
    limit = LARGEST[dtype]
    for name, info in checkpoint.tensors.items():
        if info.dtype in NOT_WEIGHTS:
            continue
        largest = _largest(checkpoint, name)
        if not largest <= limit:
            yield Overflow(name, largest)


def _largest(checkpoint: Checkpoint, name: str) -> float:
    shape = checkpoint.tensors[name].shape
    if 0 in shape or not shape:
        return 0.0
    row = max(1, checkpoint.tensors[name].nbytes // max(1, shape[0]))
    step, largest = max(1, _BLOCK_ELEMENTS // row), 0.0
    for start in range(0, shape[0], step):
        block = checkpoint.read(name, (start, min(shape[0], start + step)))
        value = float(block.abs().max())
        if not math.isfinite(value):
            return value
        largest = max(largest, value)
    return largest


def range_problems(checkpoint: Checkpoint, dtype: str, read: bool) -> list[SitscError]:
    """Errors for numbers that `dtype` cannot hold ("auto": infinities and NaN), if `read`."""
    target = "float32" if dtype == "auto" else dtype
    found = overflows(checkpoint, target) if read else ()
    return [_too_large(item, target) for item in found]


def _too_large(item: Overflow, dtype: str) -> SitscError:
    if not math.isfinite(item.largest):
        what, hint = f"{item.name} holds {item.largest}", "the file is damaged: fetch it again"
    else:
        what = f"{item.name} holds {item.largest:.4g}, {dtype} ends at {LARGEST[dtype]:.5g}"
        hint = "compile with --dtype float32" + (" or bfloat16" if dtype == "float16" else "")
    return UnsupportedModelError(what, where="weights", hint=hint)


def dtype_warnings(checkpoint: Checkpoint, dtype: str) -> list[str]:
    """What a dtype loses, by the headers alone: "auto" follows the config."""
    stored = {STORED[i.dtype] for i in checkpoint.tensors.values() if i.dtype in STORED}
    said = checkpoint.config.get("dtype", checkpoint.config.get("torch_dtype"))
    found = []
    if said in LARGEST and stored and said not in stored and checkpoint.format != "gguf":
        found.append(f"config.json says {said}, the weights are stored as {', '.join(stored)}")
    if dtype == "float16" and wider_tensors(checkpoint, dtype):
        found.append("activations of a bfloat16 model may overflow float16 where weights do not")
    if dtype == "bfloat16" and "float16" in stored:
        found.append("weights stored as float16 lose three bits of precision in bfloat16")
    return found
