"""Loading the code of an AOTInductor package without unpacking it to a disk.

In: a .pt2 file, and weights. Out: a runner of the library inside it, from a file in memory, so that
start-up needs no temporary folder and nothing is left behind.
"""

import json
import os
import tempfile
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
            calls = f"{name.removesuffix('.so')}.json"
            outside = archive.read(calls) if calls in archive.namelist() else None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path.name} is not a package: {error}") from error
    if outside is not None and json.loads(outside).get("nodes"):
        return _from_folder(path.name, code, outside)
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
        raise _unfit(path.name, error) from error


def _from_folder(package: str, code: bytes, calls: bytes) -> Any:
    """The runner of a package that calls operators by torch's dispatcher: collectives.

    Torch reads which from a file beside the library; both are gone when it is loaded.
    """
    with tempfile.TemporaryDirectory(prefix="sitsc-") as folder:
        library = Path(folder) / "model.so"
        library.write_bytes(code)
        library.with_suffix(".json").write_bytes(calls)
        try:
            return torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)  # pyright: ignore
        except RuntimeError as error:
            raise _unfit(package, error) from error


def _unfit(package: str, error: RuntimeError) -> ArtifactError:
    first = str(error).splitlines()[0]
    return ArtifactError(
        f"package {package} cannot be loaded: {first}",
        hint="was it built with this version of torch?",
    )
