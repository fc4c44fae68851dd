"""The CPU kernels and shims of an artifact, loaded so that packages find them.

The libraries' symbols become global; a process runs the kernels of one artifact at a time, since packages
call them by name. Never compiles anything.
"""

import ctypes
from pathlib import Path

from sitsc.core.errors import ArtifactError, TargetError

_NO_KERNELS = "none"


class CpuLibrary:
    """Kernels and shims; `error()` is the text of the last failure."""

    def __init__(self, kernels: Path, shims: Path) -> None:
        try:
            self._kernels = ctypes.CDLL(str(kernels), mode=ctypes.RTLD_GLOBAL)
            self._shims = ctypes.CDLL(str(shims), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ArtifactError(
                f"the kernels cannot be loaded: {error}", hint="is torch the version it was built with?"
            ) from error
        self._kernels.sitsc_cpu_isa.restype = ctypes.c_char_p
        self._kernels.sitsc_cpu_set_workspace.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._shims.sitsc_shim_error.restype = ctypes.c_char_p
        if self.isa == _NO_KERNELS:
            raise TargetError("this CPU lacks AVX2, which the kernels need")

    @property
    def isa(self) -> str:
        """The variant of the kernels that this CPU runs."""
        return self._kernels.sitsc_cpu_isa().decode()

    def set_workspace(self, pointer: int, nbytes: int) -> None:
        """Give the kernels their planned scratch memory."""
        self._kernels.sitsc_cpu_set_workspace(pointer, nbytes)

    def error(self) -> str:
        """The text of the last failure, empty when there was none."""
        return self._shims.sitsc_shim_error().decode()
