"""Weights of an unpacked artifact, read from the checkpoint folder that the user names.

In: weight specs of a plan and a folder of safetensors. Out: the buffers as kernels read them, or
where their bytes lie in the files, for readers that place them themselves.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError, CheckpointError
from sitsc.core.weights import DTYPES, ReadRows, materialise

_INDEX = "model.safetensors.index.json"
_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I8": "int8", "I32": "int32"}
_TYPES |= {"I64": "int64", "U8": "uint8", "BOOL": "bool"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in its file (`file` counts those of the folder): `start` is its first byte.

    `dtype` is the plan's name of the type, "" for one that the plan has no name for.
    """

    file: int
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of dimension 0."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize


def outside_rows(artifact: Artifact, folder: Path | None) -> ReadRows | None:
    """Rows of the checkpoint of an artifact without weights; None for one that holds its own.

    `folder` names it; without, where it was compiled from. Raises ArtifactError, CheckpointError.
    """
    if artifact.manifest.packed:
        if folder is not None:
            raise ArtifactError("this artifact holds its weights", hint="leave out --weights")
        return None
    hint = artifact.manifest.checkpoint_hint
    place = folder or (Path(hint) if hint else None)
    if place is None or not place.is_dir():
        raise ArtifactError(
            "this artifact holds no weights", hint="name the checkpoint folder with --weights DIR"
        )
    return CheckpointFiles(place).rows


def read_checkpoint(
    artifact: Artifact, folder: Path, progress: Callable[[float], None]
) -> dict[str, Tensor]:
    """Every planned weight from the checkpoint in `folder`. Raises CheckpointError."""
    reader = CheckpointFiles(folder)
    specs = artifact.plan.model.parameters
    whole, done, weights = max(1, sum(spec.nbytes for spec in specs)), 0, {}
    for spec in specs:
        weights[spec.name] = materialise(spec, reader.rows)
        done += spec.nbytes
        progress(done / whole)
    return weights


class CheckpointFiles:
    """All safetensors files of a folder: rows of tensors by name, and where tensors lie."""

    def __init__(self, folder: Path) -> None:
        """Opens the files and checks their headers. Raises CheckpointError."""
        self.paths = _shards(folder)
        self._handles: dict[str, Any] = {}
        self._file: dict[str, int] = {}
        self._headers: dict[int, tuple[int, dict[str, Any]]] = {}
        for index, path in enumerate(self.paths):
            try:
                handle: Any = safe_open(path, framework="pt")  # type: ignore[no-untyped-call]
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path.name} cannot be read: {error}") from error
            self._handles |= dict.fromkeys(names, handle)
            self._file |= dict.fromkeys(names, index)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        part = self._known(name).get_slice(name)
        if part.get_shape()[0] < stop:
            raise CheckpointError(
                f"tensor {name} is smaller than planned", hint="another checkpoint?"
            )
        return part[start:stop]

    def place(self, name: str) -> TensorPlace:
        """Where a tensor lies. Raises CheckpointError."""
        self._known(name)
        file = self._file[name]
        if file not in self._headers:
            self._headers[file] = _header(self.paths[file])
        base, header = self._headers[file]
        entry = header[name]
        dtype, start = _TYPES.get(entry["dtype"], ""), base + entry["data_offsets"][0]
        return TensorPlace(file, start, dtype, tuple(entry["shape"]))

    def _known(self, name: str) -> Any:
        if name not in self._handles:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}", hint="is it the one that was compiled?"
            )
        return self._handles[name]


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """First byte of the data and the entries of a file whose header safetensors has checked."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return 8 + length, json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error


def _shards(folder: Path) -> list[Path]:
    index, names = folder / _INDEX, []
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            found = all(isinstance(name, str) for name in names)
        except (ValueError, TypeError, KeyError, AttributeError):
            found = False
        if not found:
            raise CheckpointError(f"{_INDEX} is damaged", where=folder.name, hint="fetch it again")
    else:
        names = ["model.safetensors"]
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder} lacks {name}", hint="name the checkpoint's folder")
    return [folder / name for name in names]
