"""The CPU kernels and shims of an artifact, loaded so that packages find them, and how they run.

Packages call kernels by global name, so a process holds one build of them: artifacts with the same
build share it, another build is refused. Scratch memory and threads are of one call, never of the
process. Never compiles anything.
"""

import ctypes
import threading
from typing import Any, ClassVar

import torch
from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.env import num_threads
from sitsc.core.errors import ArtifactError, ExecutionError, TargetError

_KERNELS, _SHIMS = "cpu/kernels.so", "cpu/shims.so"
_NO_KERNELS = "none"


class _Threads(threading.local):
    """How many threads kernels get, of each thread that calls them: OpenMP keeps it so too."""

    ambient = 0  # the program's own choice
    chosen = 0  # ours


class CpuLibrary:
    """Kernels and shims, and the packages that run with them."""

    _in_process: ClassVar[dict[tuple[str, str], "CpuLibrary"]] = {}

    @classmethod
    def of(cls, artifact: Artifact) -> "CpuLibrary":
        """The library of an artifact, loaded once a process. Raises ArtifactError, TargetError."""
        entries = artifact.manifest.files
        artifact.file(_KERNELS), artifact.file(_SHIMS)
        key = (entries[_KERNELS].sha256, entries[_SHIMS].sha256)
        if key not in cls._in_process:
            if cls._in_process:
                raise ArtifactError(
                    "this process has loaded kernels of another build",
                    where=artifact.root.name,
                    hint="serve each build of sitsc from a process of its own",
                )
            cls._in_process[key] = cls(artifact)
        return cls._in_process[key]

    def __init__(self, artifact: Artifact) -> None:
        try:
            self._kernels = ctypes.CDLL(str(artifact.file(_KERNELS)), mode=ctypes.RTLD_GLOBAL)
            self._shims = ctypes.CDLL(str(artifact.file(_SHIMS)), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ArtifactError(
                f"the kernels cannot be loaded: {error}",
                hint="was the artifact built on this kind of machine and with this torch?",
            ) from error
        self._kernels.sitsc_cpu_isa.restype = ctypes.c_char_p
        self._kernels.sitsc_cpu_set_workspace.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._threads = _Threads()
        self._shims.sitsc_shim_error.restype = ctypes.c_char_p
        if self.isa == _NO_KERNELS:
            raise TargetError("this CPU lacks AVX2, which the kernels need")

    @property
    def isa(self) -> str:
        """The variant of the kernels that this CPU runs."""
        return self._kernels.sitsc_cpu_isa().decode()

    def run(
        self, name: str, runner: Any, tensors: list[Tensor], scratch: Tensor | None, threads: int
    ) -> list[Tensor]:
        """Run a package; `threads` of 0: as SITSC_THREADS or the program says.

        `scratch`, uint8 and aligned to 64 bytes, is what its kernels may use during this call:
        other programs of the process bring theirs. None: memory of the calling thread that grows.
        Raises ExecutionError with what the kernel said.
        """
        self._use_threads(threads or num_threads() or 0)
        if scratch is not None:
            self._kernels.sitsc_cpu_set_workspace(scratch.data_ptr(), scratch.numel())
        try:
            return runner.run(tensors)
        except RuntimeError as error:
            why = self._shims.sitsc_shim_error().decode() or str(error).splitlines()[0]
            raise ExecutionError(f"{name}: {why}") from error
        finally:
            self._kernels.sitsc_cpu_set_workspace(None, 0)

    def _use_threads(self, wanted: int) -> None:
        """Give kernels `wanted` threads; 0: as many as there were before a plan wanted others."""
        now, threads = torch.get_num_threads(), self._threads
        if now != threads.chosen:
            threads.ambient = now
        threads.chosen = wanted or threads.ambient
        if now != threads.chosen:
            torch.set_num_threads(threads.chosen)
