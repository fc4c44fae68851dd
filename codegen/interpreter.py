"""Rendered Triton kernels run on the CPU by Triton's interpreter, in a process of its own.

In: a kernel instance, its grid and arguments on the CPU. Out: the arguments as the kernel left
them. Triton's interpreter multiplies the bit patterns of bfloat16 in `tl.dot`; here that is put
right. For tests at tiny shapes: programs run one after another, dependent launch is not known.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from sitsc.codegen.triton_source import KernelSource, import_text
from sitsc.core.errors import CompileError


class Interpreter:
    """A process in which Triton interprets; `with Interpreter() as interpreter: ….launch(…)`."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), _start)

    def __enter__(self) -> "Interpreter":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function in that process; kernels it imports there are interpreted."""
        return self._pool.submit(function, *arguments).result()

    def launch(self, source: KernelSource, grid: Sequence[int], *arguments: Any) -> None:
        """Run all programs of the grid; tensors among the arguments are changed as on a GPU.

        Raises CompileError for a kernel with dependent launch or another number of arguments.
        """
        if source.pdl:
            raise CompileError("the interpreter knows no dependent launch", where=source.name)
        if len(arguments) != len(source.arguments):
            what = f"{len(arguments)} arguments for {len(source.arguments)}"
            raise CompileError(what, where=source.name)
        after = self._pool.submit(_run, source, tuple(grid), arguments).result()
        for tensor, new in zip(_tensors(arguments), after, strict=True):
            tensor.copy_(new)


def _tensors(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [value for value in arguments if isinstance(value, torch.Tensor)]


def _start() -> None:
    """In the new process, before Triton is imported: interpret, with the bfloat16 of a GPU."""
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    import numpy as np  # noqa: PLC0415
    import triton.language as tl  # noqa: PLC0415
    from triton.runtime import interpreter  # noqa: PLC0415

    builder = interpreter.InterpreterBuilder
    original_dot, original_cast = builder.create_dot, builder.cast_impl

    def wide(handle: Any) -> Any:
        """The numbers of an operand: bfloat16 is stored as the upper half of a float32."""
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return original_dot(self, a, b, d, *options)
        product = np.matmul(wide(a), wide(b), dtype=np.float32) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        pair = source.dtype.scalar, kind.scalar
        if pair == (tl.bfloat16, tl.float32):
            return interpreter.TensorHandle(wide(source), kind.scalar)
        if pair != (tl.float32, tl.bfloat16):
            return original_cast(self, source, kind)
        bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        rounded = np.where(np.isnan(source.data), 0x7FC0, nearest).astype(np.uint16)
        return interpreter.TensorHandle(rounded, kind.scalar)

    # The language is changed once and stays so: to change it anew in every call of a function
    # takes as long as many a kernel. Checks of 32-bit overflow never fail at tiny shapes.
    change_language = interpreter._patch_lang
    changed: set[int] = set()

    def patch_once(function: Any) -> Any:
        seen = {id(one) for one in function.__globals__.values() if one is tl or one is tl.core}
        if not seen <= changed:
            changed.update(seen)
            change_language(function)
        return interpreter._LangPatchScope()  # nothing to put back

    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    setattr(builder, "create_dot", create_dot)  # noqa: B010
    setattr(builder, "cast_impl", cast_impl)  # noqa: B010


def _run(source: KernelSource, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> list[Any]:
    kernel = getattr(import_text(source.text), source.name)
    kernel[grid](*arguments, **source.constants)
    return _tensors(arguments)
