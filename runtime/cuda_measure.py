"""What a GPU can do at most, what it is, and a decode step without an engine around it.

In: the current device. Out: bytes and operations a second from large reads, copies and matrix
products of random data; milliseconds of replaying the graph of a decode regime.
"""

import contextlib
import statistics
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sitsc.core.plan import Plan

_READ_BYTES = 4 << 30
_MATRIX = 8192
_REPEATS = 10
_READ_KERNEL = """
extern "C" __global__ void read_all(const uint4* data, unsigned int* sums, int count) {
    const int step = gridDim.x * blockDim.x;
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int total = 0;
    for (; at + 7 * step < count; at += 8 * step) {
        uint4 v[8];
        #pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = data[at + i * step];
        #pragma unroll
        for (int i = 0; i < 8; ++i) total += v[i].x + v[i].y + v[i].z + v[i].w;
    }
    for (; at < count; at += step) {
        const uint4 v = data[at];
        total += v.x + v.y + v.z + v.w;
    }
    sums[blockIdx.x * blockDim.x + threadIdx.x] = total;
}
"""


def device_facts() -> dict[str, str]:
    """Name of the GPU and version of its driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
        driver = done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = ""
    return {
        "hardware": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": str(torch.version.cuda),
    }


def measure_ceilings() -> dict[str, float]:
    """read_TBps, copy_TBps (bytes read plus written) and matmul_8192_bf16_TFLOPs.

    read_torch_TBps is the fastest of torch's own reductions, which stay below what a plain loop
    reaches; it stands for read_TBps where that loop cannot be compiled.
    """
    found = _bandwidth() | {"matmul_8192_bf16_TFLOPs": _matmul()}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def _bandwidth() -> dict[str, float]:
    free, _ = torch.cuda.mem_get_info()
    nbytes = min(_READ_BYTES, free // 4) >> 13 << 13
    data = torch.empty(nbytes // 2, dtype=torch.bfloat16, device="cuda").normal_()
    out, wide = torch.empty_like(data), data.view(torch.float32).view(1024, -1)
    reads = (data.amax, lambda: wide.sum(1), lambda: wide.view(-1).sum())
    library = nbytes / min(_seconds(call) for call in reads) / 1e12
    copy = 2 * nbytes / _seconds(lambda: out.copy_(data)) / 1e12
    read = max(library, _read_by_loop(data))
    return {"read_TBps": read, "read_torch_TBps": library, "copy_TBps": copy}


def _read_by_loop(data: torch.Tensor) -> float:
    """TB/s of a kernel that adds up all words, compiled here by NVRTC; 0 where that fails."""
    try:
        kernel = torch.cuda._compile_kernel(_READ_KERNEL, "read_all")  # pyright: ignore
    except (AttributeError, RuntimeError, OSError):
        return 0.0
    words, best = data.view(torch.int32), 0.0
    wanted = int(words.sum(dtype=torch.int64)) % 2**32
    sms = torch.cuda.get_device_properties(data.device).multi_processor_count
    for blocks in (4 * sms, 8 * sms, 32 * sms):
        sums = torch.zeros(blocks * 256, dtype=torch.int32, device=data.device)
        arguments = [data, sums, words.numel() // 4]

        def launch(blocks: int = blocks, arguments: list[Any] = arguments) -> None:
            kernel(grid=(blocks, 1, 1), block=(256, 1, 1), args=arguments)

        seconds = _seconds(launch)
        if int(sums.sum(dtype=torch.int64)) % 2**32 == wanted:
            best = max(best, 4 * words.numel() / seconds / 1e12)
    return best


def _matmul() -> float:
    a, b = torch.randn(2, _MATRIX, _MATRIX, device="cuda").bfloat16()
    return 2 * _MATRIX**3 / _seconds(lambda: a @ b) / 1e12


def _seconds(call: Callable[[], Any]) -> float:
    """Median of several runs, by events, after three to warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def measure_step(executor: Any, plan: Plan, batch: int, context: int, steps: int = 40) -> float:
    """Median milliseconds of a decode step that is only replayed; the engine must be idle."""
    page = plan.kv[0].page_tokens
    pages = -(-(context + steps + 16) // page)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [order[i * pages : (i + 1) * pages] for i in range(batch)]
    name = executor.set_decode([100 + i for i in range(batch)], [context] * batch, tables)
    for _ in range(8):
        executor.replay(name)
    executor.stream.synchronize()
    times = []
    for _ in range(4):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(executor.stream)
        for _ in range(steps // 4):
            executor.replay(name)
        end.record(executor.stream)
        end.synchronize()
        times.append(start.elapsed_time(end) / (steps // 4))
    return statistics.median(times)


@contextlib.contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """A named range in a profile."""
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
