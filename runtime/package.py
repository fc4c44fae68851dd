"""Loading the code of an AOTInductor package without unpacking it to a disk.

In: a .pt2 file. Out: a runner of the library inside it, from a file in memory, so that start-up
needs no temporary folder and nothing is left behind.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from sitsc.core.errors import ArtifactError


def load_package(path: Path) -> Any:
    """The runner of the one library in a package. Raises ArtifactError."""
    try:
        with zipfile.ZipFile(path) as archive:
            [name] = [item for item in archive.namelist() if item.endswith(".so")]
            code = archive.read(name)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path.name} is not a package: {error}") from error
    handle = os.memfd_create(path.stem)
    try:
        view = memoryview(code)
        while view:
            view = view[os.write(handle, view) :]
        place = f"/proc/self/fd/{handle}"
        # The system takes a library of a known path for loaded, and keeps this one for good: the
        # file stays open, so that no other package ever gets the path.
        return torch._C._aoti.AOTIModelContainerRunnerCpu(place, 1)  # pyright: ignore
    except RuntimeError as error:
        os.close(handle)
        first = str(error).splitlines()[0]
        raise ArtifactError(
            f"package {path.name} cannot be loaded: {first}",
            hint="was it built with this version of torch?",
        ) from error
