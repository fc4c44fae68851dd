"""Records of models, kept in the compile cache: making one takes half a minute, reading it nothing.

In: a checkpoint's place, options, and what makes its record. Out: the record that was made of the
same files with the same options, tools and source, checked when it is read, else a new one.
Imports neither torch nor a pass. Weights are known by their headers alone.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from sitsc import build_info
from sitsc.core import env, plan_file
from sitsc.core.canonical import digest, sha256_hex
from sitsc.core.errors import ArtifactError, PlanError
from sitsc.core.hardware import load_target
from sitsc.core.options import CompileOptions
from sitsc.core.records import from_value, to_value
from sitsc.passes.model_record import ModelRecord

FOLDER = "records"
_MOST_ENTRIES = 512
_WHOLE, _HEAD = 1 << 26, 1 << 20  # bytes: read whole up to so many; of larger files their beginning


def recorded(
    model: str | Path, options: CompileOptions, make: Callable[[], ModelRecord]
) -> ModelRecord:
    """The record of a checkpoint from the cache, or what `make` gives, which is then kept.

    A cache that cannot be written only means that `make` is called the next time too.
    """
    files = files_of(Path(model))
    if files is None:  # nothing to open: `make` says why
        return make()
    place = env.cache_dir() / FOLDER / f"{_key(files, options)}.json"
    found = _read(place)
    if found is None:
        found = make()
        with contextlib.suppress(ArtifactError, OSError):
            plan_file.write_text(place, _text(found))
            _drop_oldest(place.parent)
    return found


def _key(files: dict[str, Any], options: CompileOptions) -> str:
    """What a record depends on. Of the target only its kind: GPUs of all kinds get one graph."""
    gpu = load_target(options.target).cuda is not None
    chosen = {f.name: to_value(getattr(options, f.name)) for f in fields(options)}
    return digest(
        {
            "files": files,
            "options": chosen | {"target": [gpu, options.is_cpu]},
            "tools": build_info.tools(),
            "source": build_info.source_digest(),
        }
    )


def files_of(model: Path) -> dict[str, Any] | None:
    """Each file that may say something of a model, and what of it counts; None for no model.

    Beside an ONNX file others lie that belong to it.
    """
    try:
        alone = model.is_file() and model.suffix.lower() != ".onnx"
        folder = model.parent if model.is_file() else model
        paths = [model] if alone else sorted(p for p in folder.iterdir() if p.is_file())
        named = model.name if model.is_file() else ""
        return {"model": named} | {f"file {p.name}": _content(p) for p in paths}
    except OSError:
        return None


def _content(path: Path) -> list[Any]:
    """Size and digest: of safetensors the header, of small files all, of others also when."""
    stat = path.stat()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            size = int.from_bytes(file.read(8), "little")
            return [stat.st_size, sha256_hex(file.read(min(size, _WHOLE)))]
        if stat.st_size <= _WHOLE:
            return [stat.st_size, sha256_hex(file.read())]
        return [stat.st_size, sha256_hex(file.read(_HEAD)), stat.st_mtime_ns]


def _text(record: ModelRecord) -> str:
    """The record with its digest; numbers as they are, which canonical JSON would round."""
    text = json.dumps(to_value(record), sort_keys=True)
    return json.dumps({"sha256": sha256_hex(text.encode()), "record": text}) + "\n"


def _read(place: Path) -> ModelRecord | None:
    """A record as it was kept; None for none, for one that was altered or that another made."""
    try:
        value = json.loads(place.read_text())
        text = value["record"]
        if sha256_hex(text.encode()) != value["sha256"]:
            return None
        found = from_value(ModelRecord, json.loads(text), "record")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, PlanError):
        return None
    with contextlib.suppress(OSError):
        place.touch()
    return found


def _drop_oldest(folder: Path) -> None:
    """Drop the records that were not used for longest."""
    kept = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in kept[:-_MOST_ENTRIES]:
        path.unlink(missing_ok=True)
