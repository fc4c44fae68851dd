"""Speed of the CPU kernels at the shapes of SmolLM2-135M: µs, GB/s, GFLOP/s, best of many.

Every decode pass goes over the weights of all 30 layers, so that no weight stays in the cache:
`python bench/cpu_kernels.py [decode] [prefill] [attention] [--isa NAME] [--layers 30]`.
"""

import argparse
import math
import mmap
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sitsc.codegen.cpu_ctypes import CpuKernels
from sitsc.codegen.cpu_kernels import KernelSpec, compile_library, render
from sitsc.core.weight_formats import packed_nbytes, packed_shape

HIDDEN, INTERMEDIATE, VOCAB, Q_HEADS, KV_HEADS, HEAD_DIM = 576, 1536, 49152, 9, 3, 64
HUGE_PAGES = True
DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8, "f32": torch.float32}


@dataclass(frozen=True, slots=True)
class Shape:
    """One linear of the model: weight [rows, k], how often it occurs, prologue and epilogue."""

    name: str
    rows: int
    k: int
    norm: bool
    epilogue: int  # 0 none, 1 residual, 2 glu


SHAPES = (
    Shape("qkv", 960, HIDDEN, True, 0),
    Shape("o", HIDDEN, HIDDEN, False, 1),
    Shape("gate_up", 2 * INTERMEDIATE, HIDDEN, True, 2),
    Shape("down", HIDDEN, INTERMEDIATE, False, 1),
    Shape("lm_head", VOCAB, HIDDEN, True, 0),
)


def random_weight(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """A packed weight of random values in huge pages, as the runtime places weights."""
    shape = packed_shape(rows, k, dtype)
    memory = mmap.mmap(-1, packed_nbytes(rows, k, dtype), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE_PAGES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    weight = torch.frombuffer(memory, dtype=dtype).view(shape)
    if dtype is torch.int8:
        return weight.random_(-127, 128)
    return weight.copy_(torch.randn(shape))


def bind_linear(kernels: CpuKernels, shape: Shape, dtype: torch.dtype, tokens: int) -> Callable:
    """A call of the linear `shape` with weights of its own."""
    x_dtype = torch.float32 if dtype is torch.float32 else torch.bfloat16
    n = shape.rows // 2 if shape.epilogue == 2 else shape.rows
    x = torch.randn(tokens, shape.k).to(x_dtype)
    residual, out = torch.randn(tokens, n).to(x_dtype), torch.empty(tokens, n, dtype=x_dtype)
    return kernels.bind(
        "linear", x=x, x_stride=shape.k, x_dtype=x_dtype, tokens=tokens, n=n, k=shape.k,
        weight=random_weight(shape.rows, shape.k, dtype), weight_dtype=dtype,
        scale=torch.full((shape.rows,), 1e-3), prologue=int(shape.norm),
        norm_weight=torch.ones(shape.k, dtype=x_dtype), eps=1e-5, epilogue=shape.epilogue,
        residual=residual, residual_stride=n, out=out, out_stride=n, out_dtype=x_dtype,
    )  # fmt: skip


def bind_attention(
    kernels: CpuKernels, tokens: int, context: int, layers: int
) -> Iterator[Callable]:
    """Calls of one attention a layer, each with a cache of its own."""
    bf16, width = torch.bfloat16, (Q_HEADS + 2 * KV_HEADS) * HEAD_DIM
    pages = -(-(context + tokens) // 16)
    table = torch.randperm(pages).to(torch.int32)
    cos, sin = torch.randn(2, tokens, HEAD_DIM).to(bf16)
    for _ in range(layers):
        qkv = torch.randn(tokens, width).to(bf16)
        caches = torch.randn(2, pages, KV_HEADS * HEAD_DIM * 16).to(bf16)
        yield kernels.bind(
            "attention", q=qkv, k=qkv[:, Q_HEADS * HEAD_DIM :],
            v=qkv[:, (Q_HEADS + KV_HEADS) * HEAD_DIM :], q_stride_token=width,
            q_stride_head=HEAD_DIM, k_stride_token=width, k_stride_head=HEAD_DIM,
            v_stride_token=width, v_stride_head=HEAD_DIM, dtype=bf16, cos=cos, sin=sin,
            cos_stride=HEAD_DIM, rotary_dim=HEAD_DIM, rope_style=1, k_cache=caches[0],
            v_cache=caches[1], kv_dtype=bf16, page_tokens=16, page_stride=caches.shape[2],
            num_pages=pages, block_table=table, block_table_stride=pages,
            query_start=torch.tensor([0, tokens], dtype=torch.int32),
            context_len=torch.tensor([context], dtype=torch.int32), seqs=1, tokens=tokens,
            q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, v_head_dim=HEAD_DIM,
            scale=1 / math.sqrt(HEAD_DIM), out=torch.empty(tokens, Q_HEADS * HEAD_DIM, dtype=bf16),
            out_stride=Q_HEADS * HEAD_DIM,
        )  # fmt: skip


def best_us(calls: list[Callable], seconds: float = 0.7) -> float:
    """Least µs of one pass over `calls`, of as many passes as fit in `seconds` (at least 3)."""
    best, end, passes = math.inf, time.perf_counter() + seconds, 0
    while passes < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for call in calls:
            call()
        best = min(best, time.perf_counter() - start)
        passes += 1
    return best * 1e6


def decode_table(kernels: CpuKernels, layers: int, tokens: int) -> Table:
    """One row a linear and dtype; the last row of a dtype is a whole step without attention."""
    table = Table("dtype", "kernel", "µs", "GB/s", title=f"linear, {tokens} token(s)")
    for label, dtype in DTYPES.items():
        step: list[list[Callable]] = []
        for shape in SHAPES:
            copies = 1 if shape.name == "lm_head" else layers
            calls = [bind_linear(kernels, shape, dtype, tokens) for _ in range(copies)]
            step.append(calls)
            micros = best_us(calls) / copies
            gbytes = packed_nbytes(shape.rows, shape.k, dtype) / micros / 1e3
            table.add_row(label, shape.name, f"{micros:.1f}", f"{gbytes:.1f}")
        whole = [call for layer in zip(*step[:-1], strict=True) for call in layer] + step[-1]
        attention = list(bind_attention(kernels, tokens, 128, layers))
        micros = best_us(whole, 2)
        size = sum(
            packed_nbytes(s.rows, s.k, dtype) * (1 if s.name == "lm_head" else layers)
            for s in SHAPES
        )
        table.add_row(label, "all linears", f"{micros:.0f}", f"{size / micros / 1e3:.1f}")
        mixed = [
            call
            for i in range(layers)
            for call in (step[0][i], attention[i], step[1][i], step[2][i], step[3][i])
        ]
        micros = best_us(mixed + step[-1], 2)
        table.add_row(
            label, "with attention 128", f"{micros:.0f}", f"{1e6 * tokens / micros:.0f} token/s"
        )
    return table


def prefill_table(kernels: CpuKernels, tokens: int) -> Table:
    """GFLOP/s beside torch's bf16 linear; ours includes norm, activation and residual."""
    table = Table("kernel", *DTYPES, "torch bf16", title=f"linear, {tokens} tokens, GFLOP/s")
    for shape in SHAPES[:-1]:
        flops = 2 * tokens * shape.rows * shape.k
        row = [shape.name]
        for dtype in DTYPES.values():
            micros = best_us([bind_linear(kernels, shape, dtype, tokens)])
            row.append(f"{flops / micros / 1e3:.0f}")
        x, weight = torch.randn(tokens, shape.k), torch.randn(shape.rows, shape.k)
        x, weight = x.bfloat16(), weight.bfloat16()
        micros = best_us([lambda x=x, w=weight: torch.nn.functional.linear(x, w)])
        table.add_row(*row, f"{flops / micros / 1e3:.0f}")
    return table


def attention_table(kernels: CpuKernels, layers: int) -> Table:
    """Decode reads the cache of every layer once; prefill counts causal FLOPs."""
    table = Table("tokens", "context", "µs a layer", "GB/s", "GFLOP/s", title="attention, bf16")
    for tokens, context in ((1, 128), (1, 1024), (1, 4096), (512, 0), (512, 4096)):
        calls = list(bind_attention(kernels, tokens, context, layers if tokens == 1 else 1))
        micros = best_us(calls) / len(calls)
        size = 2 * (context + tokens) * KV_HEADS * HEAD_DIM * 2
        pairs = tokens * context + tokens * (tokens + 1) / 2
        flops = 4 * pairs * Q_HEADS * HEAD_DIM
        table.add_row(
            str(tokens), str(context), f"{micros:.1f}", f"{size / micros / 1e3:.1f}",
            f"{flops / micros / 1e3:.0f}",
        )  # fmt: skip
    return table


def main() -> None:
    """Compile the library, print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["decode", "prefill", "attention"])
    parser.add_argument("--isa", default=None)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.so")
        compile_library(render(KernelSpec()), path)
        kernels = CpuKernels(path)
        if not kernels.select_isa(options.isa):
            raise SystemExit(f"this CPU does not run {options.isa}")
        console.print(f"{kernels.isa()}, {options.threads} threads")
        if "decode" in options.what:
            console.print(decode_table(kernels, options.layers, options.tokens))
        if "prefill" in options.what:
            console.print(prefill_table(kernels, 512))
        if "attention" in options.what:
            console.print(attention_table(kernels, options.layers))


if __name__ == "__main__":
    main()
