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
from functools import partial
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


def huge_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor in transparent huge pages: they read up to twice as fast as small ones."""
    size = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE_PAGES:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def random_weight(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """A packed weight of random values in huge pages, as the runtime places weights."""
    weight = huge_empty(packed_shape(rows, k, dtype), dtype)
    if dtype is torch.int8:
        return weight.random_(-127, 128)
    return weight.normal_()


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
    angles = torch.rand(tokens, HEAD_DIM) * 6
    cos, sin = angles.cos().to(bf16), angles.sin().to(bf16)
    pool = huge_empty((layers, 2, pages, KV_HEADS * HEAD_DIM * 16), bf16).normal_()
    for caches in pool:
        qkv = torch.randn(tokens, width).to(bf16)
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


@dataclass(slots=True)
class Job:
    """Calls that are timed as one pass; `us` is the least time of a pass so far."""

    labels: tuple[str, ...]
    calls: list[Callable]
    amount: float = 0.0  # bytes or FLOPs of a pass
    us: float = math.inf

    @property
    def per_us(self) -> float:
        """Amount / µs / 1000: GB/s or GFLOP/s."""
        return self.amount / self.us / 1e3


def measure(jobs: list[Job], seconds: float) -> None:
    """Time the jobs in turns, so that a burst of other work on the machine spoils none of them."""
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        rounds += 1
        for job in jobs:
            for _ in range(2):
                start = time.perf_counter()
                for call in job.calls:
                    call()
                job.us = min(job.us, (time.perf_counter() - start) * 1e6)


def decode_jobs(kernels: CpuKernels, label: str, layers: int, tokens: int) -> list[Job]:
    """One job a linear, then all of them as a decode step runs them, without and with attention."""
    dtype, jobs, step, total = DTYPES[label], [], [], 0
    for shape in SHAPES:
        copies = 1 if shape.name == "lm_head" else layers
        calls = [bind_linear(kernels, shape, dtype, tokens) for _ in range(copies)]
        size = packed_nbytes(shape.rows, shape.k, dtype) * copies
        total += size
        step.append(calls)
        jobs.append(Job((label, shape.name), calls, size))
    attention = list(bind_attention(kernels, tokens, 128, layers))
    qkv, o, gate_up, down, lm_head = step
    layered = list(zip(qkv, attention, o, gate_up, down, strict=True))
    linears = [call for layer in layered for call in (layer[0], *layer[2:])]
    jobs.append(Job((label, "all linears"), linears + lm_head, total))
    whole = [call for layer in layered for call in layer]
    jobs.append(Job((label, "with attention 128"), whole + lm_head, total))
    return jobs


def decode_table(kernels: CpuKernels, layers: int, tokens: int, seconds: float) -> Table:
    """µs a call and GB/s of weights; the last rows of a dtype are a whole step."""
    table = Table("dtype", "kernel", "µs", "GB/s", "token/s", title=f"linear, {tokens} token(s)")
    for label in DTYPES:
        jobs = decode_jobs(kernels, label, layers, tokens)
        measure(jobs, seconds)
        for job in jobs:
            whole = job.labels[1].startswith(("all", "with"))
            micros = job.us if whole else job.us / len(job.calls)
            rate = f"{1e6 * tokens / job.us:.0f}" if whole else ""
            table.add_row(*job.labels, f"{micros:.1f}", f"{job.per_us:.1f}", rate)
    return table


def prefill_table(kernels: CpuKernels, tokens: int, seconds: float) -> Table:
    """GFLOP/s beside torch's bf16 linear; ours includes norm, activation and residual."""
    table = Table("kernel", *DTYPES, "torch bf16", title=f"linear, {tokens} tokens, GFLOP/s")
    rows: list[list[Job]] = []
    for shape in SHAPES[:-1]:
        flops = 2 * tokens * shape.rows * shape.k
        row = [
            Job((shape.name,), [bind_linear(kernels, shape, dtype, tokens)], flops)
            for dtype in DTYPES.values()
        ]
        x, weight = torch.randn(tokens, shape.k), torch.randn(shape.rows, shape.k)
        x, weight = x.bfloat16(), weight.bfloat16()
        call = partial(torch.nn.functional.linear, x, weight)
        rows.append([*row, Job((shape.name,), [call], flops)])
    measure([job for row in rows for job in row], seconds)
    for row in rows:
        table.add_row(row[0].labels[0], *(f"{job.per_us:.0f}" for job in row))
    return table


def attention_table(kernels: CpuKernels, layers: int, seconds: float) -> Table:
    """Decode reads the cache of every layer once; prefill counts causal FLOPs."""
    table = Table("tokens", "context", "µs a layer", "GB/s", "GFLOP/s", title="attention, bf16")
    jobs = []
    for tokens, context in ((1, 128), (1, 1024), (1, 4096), (512, 0), (512, 4096)):
        calls = list(bind_attention(kernels, tokens, context, layers if tokens == 1 else 1))
        pairs = tokens * context + tokens * (tokens + 1) / 2
        flops = 4 * pairs * Q_HEADS * HEAD_DIM * len(calls)
        jobs.append(Job((str(tokens), str(context)), calls, flops))
    measure(jobs, seconds)
    for job in jobs:
        micros = job.us / len(job.calls)
        size = 4 * sum(map(int, job.labels)) * KV_HEADS * HEAD_DIM
        gbytes = f"{size / micros / 1e3:.1f}"
        table.add_row(*job.labels, f"{micros:.1f}", gbytes, f"{job.per_us:.0f}")
    return table


def main() -> None:
    """Compile the library, print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="*", default=["decode", "prefill", "attention"])
    parser.add_argument("--isa", default=None)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=10, help="for each group of kernels")
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
            console.print(decode_table(kernels, options.layers, options.tokens, options.seconds))
        if "prefill" in options.what:
            console.print(prefill_table(kernels, 512, options.seconds))
        if "attention" in options.what:
            console.print(attention_table(kernels, options.layers, options.seconds))


if __name__ == "__main__":
    main()
