"""All kernels of an artifact to machine code: a pool of fresh processes, and a cache.

In: kernel instances and an architecture number (90). Out: `kernels/sm_90/<key>.cubin`, its
metadata `.json` and its source `.py` for each, the same bytes on every machine. A kernel that
spills registers, or needs more shared memory than the architecture has, is refused. One that was
compiled by the same Triton before comes from the compile cache.
"""

import contextlib
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from sitsc.codegen.aot_kernel import (
    CompiledKernel,
    check_limits,
    compile_unchecked,
    source_name,
    triton_version,
)
from sitsc.codegen.triton_source import KernelSource
from sitsc.core import build_cache, env
from sitsc.core.canonical import digest
from sitsc.core.errors import ArtifactError, CompileError
from sitsc.core.hardware import shared_memory_bytes
from sitsc.core.kernel_meta import KernelMeta, kernel_folder, read_kernel_meta

__all__ = ["CompiledKernel", "compile_kernel", "compile_kernels"]

Progress = Callable[[float], None]
_CACHE = "kernels"  # below the folder of the compile cache, with a limit of its own
_CACHED_KERNELS = 4096
_VERSION = 2  # raise it when the compiler options or the metadata change


def compile_kernel(source: KernelSource, sm: int) -> CompiledKernel:
    """Compile one kernel in this process, without the cache. Raises CompileError, TargetError."""
    limit = shared_memory_bytes(sm)
    kernel = compile_unchecked(source, sm)
    check_limits(kernel.metadata, limit)
    return kernel


def compile_kernels(
    sources: Sequence[KernelSource],
    sm: int,
    folder: Path,
    progress: Progress = lambda share: None,
    jobs: int = 2,
    refused: list[CompileError] | None = None,
) -> tuple[KernelMeta, ...]:
    """Compile for `sm` into the artifact folder; metadata in the order of `sources`.

    Equal sources are compiled once. `progress` gets the share done, 0 to 1. Raises CompileError
    naming kernel and tile, CacheError, OSError of the folder. With a list `refused`, kernels that
    cannot be compiled or break a limit are told there and left out.
    """
    unique = {source.key(): source for source in sources}
    out, limit = Path(folder) / kernel_folder(sm), shared_memory_bytes(sm)
    out.mkdir(parents=True, exist_ok=True)
    metas: dict[str, KernelMeta] = {}
    for done, kernel in enumerate(_all_kernels(unique, sm, jobs, refused), 1):
        with _told(refused):
            check_limits(kernel.metadata, limit)
            key = kernel.metadata.key
            _write(kernel, unique[key].text, out)
            metas[key] = kernel.metadata
        progress(done / len(unique))
    _forget_oldest()
    known = (metas.get(source.key()) for source in sources)
    return tuple(meta for meta in known if meta is not None)


@contextlib.contextmanager
def _told(refused: list[CompileError] | None) -> Iterator[None]:
    """Keeps a refusal in the list, if there is one."""
    try:
        yield
    except CompileError as error:
        if refused is None:
            raise
        refused.append(error)


def _all_kernels(
    unique: dict[str, KernelSource], sm: int, jobs: int, refused: list[CompileError] | None
) -> Iterator[CompiledKernel]:
    """Every kernel: first those in the cache, then the others as they are compiled."""
    missing: list[KernelSource] = []
    for key, source in unique.items():
        if (known := _cached(key, sm)) is not None:
            yield known
        else:
            missing.append(source)
    for kernel in _compiled(missing, sm, jobs, refused):
        entry = _entry(kernel.metadata.key, sm)
        (env.cache_dir() / _CACHE).mkdir(parents=True, exist_ok=True)
        build_cache.add(entry, lambda to, kernel=kernel: _write(kernel, None, to))
        yield kernel


def _compiled(
    sources: list[KernelSource], sm: int, jobs: int, refused: list[CompileError] | None
) -> Iterator[CompiledKernel]:
    """Compile in fresh processes, which have no GPU, no torch and no interpreter in them."""
    if not sources:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(sources)), mp_context=context) as pool:
        tasks = {pool.submit(compile_unchecked, source, sm): source for source in sources}
        try:
            for task in as_completed(tasks):
                kernel = None
                with _told(refused):
                    kernel = task.result()
                if kernel is not None:
                    yield kernel
        except BrokenProcessPool as error:
            raise CompileError(
                f"the compiler crashed on one of: {_unfinished(tasks)}",
                where=f"sm_{sm}",
                hint="too little memory, or a fault in Triton: compile them one by one",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _unfinished(tasks: dict[Future[CompiledKernel], KernelSource]) -> str:
    """The kernels that a broken pool did not deliver, the first few by name."""
    lost = [source for task, source in tasks.items() if task.cancelled() or task.exception()]
    more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
    return "; ".join(source_name(source) for source in lost[:3]) + more


def _entry(key: str, sm: int) -> str:
    """The place of a kernel in the compile cache."""
    return f"{_CACHE}/{digest([key, sm, triton_version(), _VERSION])}"


def _cached(key: str, sm: int) -> CompiledKernel | None:
    """The kernel from the cache; None when it is not there or not readable."""
    entry = build_cache.find(_entry(key, sm))
    if entry is None:
        return None
    try:
        meta = read_kernel_meta((entry / f"{key}.json").read_text(), key)
        return CompiledKernel((entry / f"{key}.cubin").read_bytes(), meta)
    except (ArtifactError, OSError):
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _write(kernel: CompiledKernel, text: str | None, folder: Path) -> None:
    """Write cubin, metadata and (where given) source to a folder."""
    key = kernel.metadata.key
    (folder / f"{key}.cubin").write_bytes(kernel.cubin)
    (folder / f"{key}.json").write_text(kernel.metadata.text())
    if text is not None:
        (folder / f"{key}.py").write_text(text)


def _forget_oldest() -> None:
    """Drop the kernels of the cache that were not used for longest."""
    folder = env.cache_dir() / _CACHE
    entries = (
        sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    )
    for entry in entries[:-_CACHED_KERNELS]:
        shutil.rmtree(entry, ignore_errors=True)
