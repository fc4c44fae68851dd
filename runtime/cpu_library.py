"""The CPU kernels and shims of an artifact, loaded so that packages find them.

Packages call kernels by global name, so a process holds one build of them: artifacts with the same
build share it, another build is refused. Never compiles anything.
"""

import ctypes
from typing import ClassVar

from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError, TargetError

_KERNELS, _SHIMS = "cpu/kernels.so", "cpu/shims.so"
_NO_KERNELS = "none"


class CpuLibrary:
    """Kernels and shims; `error()` is the text of the last failure."""

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
        self._workspace = (0, 0)
        self._shims.sitsc_shim_error.restype = ctypes.c_char_p
        if self.isa == _NO_KERNELS:
            raise TargetError("this CPU lacks AVX2, which the kernels need")

    @property
    def isa(self) -> str:
        """The variant of the kernels that this CPU runs."""
        return self._kernels.sitsc_cpu_isa().decode()

    def set_workspace(self, pointer: int, nbytes: int) -> None:
        """Give the kernels the planned scratch memory of the plan that runs next."""
        if self._workspace != (pointer, nbytes):
            self._kernels.sitsc_cpu_set_workspace(pointer, nbytes)
            self._workspace = (pointer, nbytes)

    def error(self) -> str:
        """The text of the last failure, empty when there was none."""
        return self._shims.sitsc_shim_error().decode()
