"""Writing an ONNX model: weights one at a time, inside the file or in one beside it; whole or not.

Both files get their names at the end, the data first, so that a model is never there without it.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from onnx import ModelProto, TensorProto
from torch import Tensor

from sitsc.core.artifact import ArtifactExistsError
from sitsc.core.disk import PARTIAL, disk_errors
from sitsc.export.onnx_builder import Promise
from sitsc.export.onnx_values import ONNX_TYPES

OUTSIDE_BYTES = 512 << 20
_ALIGNMENT = 4096


def check_new(out: Path) -> None:
    """Raises ArtifactExistsError when the model, or its file of data, is there already."""
    for path in (out, data_path(out)):
        if os.path.lexists(path):
            raise ArtifactExistsError(
                f"{path} exists already", hint="choose another -o, or remove it first"
            )


def data_path(out: Path) -> Path:
    """Where weights outside of the model lie."""
    return out.with_name(f"{out.name}.data")


def write_model(
    model: ModelProto,
    promises: list[Promise],
    out: Path,
    progress: Callable[[float], None],
    outside_bytes: int = OUTSIDE_BYTES,
) -> list[Path]:
    """Add the weights and write the file, with the weights outside from `outside_bytes` on.

    Returns what was written. Raises ArtifactExistsError, or ArtifactError of the disk.
    """
    check_new(out)
    whole = sum(promise.nbytes for promise in promises)
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}{PARTIAL}") as name:
            folder = Path(name)
            written = []
            if whole >= outside_bytes:
                written.append(data_path(out))
                _outside(model, promises, folder / written[0].name, progress)
            else:
                _inside(model, promises, progress)
            (folder / out.name).write_bytes(model.SerializeToString())
            written.append(out)
            check_new(out)
            for path in written:
                os.rename(folder / path.name, path)
    return written


def _tensor(model: ModelProto, promise: Promise) -> Any:
    tensor = model.graph.initializer.add()
    tensor.name, tensor.data_type = promise.name, ONNX_TYPES[promise.dtype]
    tensor.dims.extend(promise.shape)
    return tensor


def _bytes(promise: Promise) -> memoryview:
    made: Tensor = promise.make()
    assert tuple(made.shape) == promise.shape and made.dtype == promise.dtype, promise.name
    return made.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _inside(model: ModelProto, promises: list[Promise], progress: Callable[[float], None]) -> None:
    for done, promise in enumerate(promises):
        _tensor(model, promise).raw_data = _bytes(promise).tobytes()
        progress((done + 1) / len(promises))


def _outside(
    model: ModelProto, promises: list[Promise], path: Path, progress: Callable[[float], None]
) -> None:
    with path.open("wb") as file:
        for done, promise in enumerate(promises):
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            tensor = _tensor(model, promise)
            tensor.data_location = TensorProto.EXTERNAL
            place = {"location": path.name, "offset": file.tell(), "length": promise.nbytes}
            for key, value in place.items():
                tensor.external_data.add(key=key, value=str(value))
            file.write(_bytes(promise))
            progress((done + 1) / len(promises))
