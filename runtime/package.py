"""Loading the code of an AOTInductor package without unpacking it to a disk.

In: a .pt2 file, and weights. Out: a runner of the library inside it, from a file in memory, so that
start-up needs no temporary folder and nothing is left behind.
"""

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError, PlanError
from sitsc.core.plan import Package


def bind_package(artifact: Artifact, package: Package, weights: dict[str, Tensor]) -> Any:
    """A package ready to run: its code in memory, its constants the planned weights.

    Raises ArtifactError, and PlanError for a constant that the plan does not name.
    """
    runner = load_package(artifact.file(package.file))
    constants = {}
    for key in runner.get_constant_names_to_original_fqns().values():
        if key not in package.constants:
            raise PlanError(f"package {package.file} wants constant {key}, which the plan lacks")
        constants[key] = weights[package.constants[key]]
    runner.update_constant_buffer(constants, False, True, True)
    return runner


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
