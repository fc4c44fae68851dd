"""Weights of an unpacked artifact, read from the checkpoint folder that the user names.

In: weight specs of a plan and a folder of safetensors. Out: the buffers as kernels read them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.errors import CheckpointError
from sitsc.core.weights import materialise

_INDEX = "model.safetensors.index.json"


def read_checkpoint(
    artifact: Artifact, folder: Path, progress: Callable[[float], None]
) -> dict[str, Tensor]:
    """Every planned weight from the checkpoint in `folder`. Raises CheckpointError."""
    reader = _Reader(folder)
    specs = artifact.plan.model.parameters
    whole, done, weights = max(1, sum(spec.nbytes for spec in specs)), 0, {}
    for spec in specs:
        weights[spec.name] = materialise(spec, reader.rows)
        done += spec.nbytes
        progress(done / whole)
    return weights


class _Reader:
    """Rows of tensors by name, over all files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in _shards(folder):
            try:
                handle: Any = safe_open(path, framework="pt")  # type: ignore[no-untyped-call]
                names = handle.keys()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path.name} cannot be read: {error}") from error
            self._files |= dict.fromkeys(names, handle)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        if name not in self._files:
            raise CheckpointError(
                f"the checkpoint has no tensor {name}", hint="is it the one that was compiled?"
            )
        part = self._files[name].get_slice(name)
        if part.get_shape()[0] < stop:
            raise CheckpointError(
                f"tensor {name} is smaller than planned", hint="another checkpoint?"
            )
        return part[start:stop]


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
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
