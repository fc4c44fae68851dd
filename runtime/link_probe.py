"""Collectives between processes of this machine, timed: gloo on CPUs, NCCL between GPUs.

In: a backend, how many ranks, message sizes. Out: seconds of each collective at each size, the
slowest rank's. Starts one process a rank and ends them all; needs no free port.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from sitsc.core.errors import DeviceError, OptionError

GLOO, NCCL = "gloo", "nccl"
SIZES = (1 << 13, 1 << 15, 1 << 17, 1 << 19, 1 << 21, 1 << 23, 1 << 25)
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "send")
_WARM, _MOST_TIMES, _TIMEOUT = 3, 200, timedelta(seconds=60)
_GRAPHED = 20


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """Seconds of a collective whose result (all_to_all: what a rank sends) has `nbytes`."""

    collective: str
    nbytes: int
    seconds: float


def check_ranks(backend: str, ranks: int) -> None:
    """Raises OptionError or DeviceError when so many ranks cannot be."""
    if backend not in (GLOO, NCCL):
        raise OptionError(f"--backend {backend!r} is unknown", hint=f"{GLOO} or {NCCL}")
    if not 2 <= ranks <= 64:
        raise OptionError(f"{ranks} ranks cannot be measured", hint="2 to 64")
    if backend == NCCL and torch.cuda.device_count() < ranks:
        raise DeviceError(
            f"{ranks} ranks need {ranks} GPUs, this machine has {torch.cuda.device_count()}",
            hint=f"--ranks {max(2, torch.cuda.device_count())}, or --backend {GLOO}",
        )


def measure_links(
    backend: str, ranks: int, sizes: tuple[int, ...] = SIZES, seconds: float = 0.3
) -> list[LinkPoint]:
    """Every collective at every size, about `seconds` for each. Raises DeviceError, OptionError."""
    check_ranks(backend, ranks)
    with tempfile.TemporaryDirectory(prefix="sitsc-links-") as folder:
        place = Path(folder)
        try:
            arguments = (ranks, backend, str(place), sizes, seconds)
            mp.spawn(_rank, arguments, nprocs=ranks)  # pyright: ignore[reportPrivateImportUsage]
        except (ProcessRaisedException, ProcessExitedException) as error:
            last = str(error).strip().splitlines()[-1]
            raise DeviceError(
                f"measuring {backend} failed: {last}", hint="fewer --ranks, or another --backend"
            ) from None
        times = [torch.load(place / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    keys = [(name, size) for name in COLLECTIVES for size in sizes]
    slowest = torch.stack(times).amax(0).tolist()
    return [LinkPoint(n, s, t) for (n, s), t in zip(keys, slowest, strict=True)]


def _rank(
    rank: int, ranks: int, backend: str, folder: str, sizes: tuple[int, ...], seconds: float
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == NCCL:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=_TIMEOUT,
    )
    try:
        times = []
        for name in COLLECTIVES:
            for size in sizes:
                call = _call(name, size, rank, ranks, device)
                times.append(_timed(call, device, seconds))
        torch.save(torch.tensor(times, dtype=torch.float64), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _call(
    name: str, nbytes: int, rank: int, ranks: int, device: torch.device
) -> Callable[[], object]:
    """One call of a collective on buffers of its own; bfloat16, as activations are."""
    count = max(ranks, nbytes // 2 // ranks * ranks)
    x = torch.ones(count, dtype=torch.bfloat16, device=device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(x)
    if name == "all_gather":
        part = torch.ones(count // ranks, dtype=torch.bfloat16, device=device)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(x, part)
    if name == "all_to_all":
        out = torch.empty_like(x)
        return lambda: dist.all_to_all_single(out, x)

    def pass_on() -> None:
        if rank == 0:
            dist.send(x, 1)
        elif rank == 1:
            dist.recv(x, 0)

    return pass_on


def _timed(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The fastest of several batches of calls, every batch begun together."""
    for _ in range(_WARM):
        call()
    many = 1
    if device.type == "cuda":
        many, call = _GRAPHED, _graphed(call)
    first = _batch(call, device, 1)
    count = torch.tensor(float(min(_MOST_TIMES, max(3, seconds / max(first, 1e-7)))))
    shared = count.to(device)
    dist.broadcast(shared, 0)  # all ranks call as often
    each = max(1, int(shared.item()) // 5)
    return min(_batch(call, device, each) for _ in range(5)) / many


def _batch(call: Callable[[], object], device: torch.device, count: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


def _graphed(call: Callable[[], object]) -> Callable[[], object]:
    """Several calls as one CUDA graph, as a decode step has them."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPHED):
            call()
    return graph.replay
