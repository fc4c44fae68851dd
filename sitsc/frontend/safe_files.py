"""Reading files of an untrusted model folder: bounded, regular, inside the folder, strict JSON.

In: a folder and a plain file name. Out: a checked path, bytes, or a parsed JSON object.
Never follows a name or a link out of the folder, except into the blobs of a hub cache snapshot.
"""

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

from sitsc.core.errors import CheckpointError

MAX_JSON_BYTES = 64 << 20
MAX_SHOWN_NAME = 120


def shown(name: object) -> str:
    """`repr` of an untrusted value, cut short so that an error stays one line."""
    text = ascii(name)
    return text if len(text) <= MAX_SHOWN_NAME else text[:MAX_SHOWN_NAME] + "…"


def is_plain_name(name: str) -> bool:
    """Whether `name` is one path component of printable characters, and not `.` or `..`."""
    return (
        name.isprintable()
        and 0 < len(name.encode()) <= 255
        and name not in (".", "..")
        and not any(mark in name for mark in "/\\:\0")
    )


def file_inside(root: Path, name: str) -> Path:
    """Path of the regular file `name` directly in `root`; CheckpointError when it is not one."""
    if not is_plain_name(name):
        raise CheckpointError(
            f"file name {shown(name)} is not a plain name inside the model folder",
            where=root.name,
            hint="the checkpoint's index is damaged or hostile; fetch it again",
        )
    path = root / name
    try:
        target = path.resolve(strict=True)
        regular = stat.S_ISREG(target.stat().st_mode)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"file {name} is missing", where=root.name, hint="fetch the checkpoint again"
        ) from error
    if not regular:
        raise CheckpointError(f"{name} is not a regular file", where=root.name)
    if not any(target.is_relative_to(folder) for folder in _allowed_folders(root)):
        raise CheckpointError(
            f"{name} is a link that leaves the model folder",
            where=root.name,
            hint="copy the file into the folder",
        )
    return path


def _allowed_folders(root: Path) -> list[Path]:
    # A hub cache keeps snapshots/<revision>/name as links into blobs/ two levels up.
    folder = root.resolve()
    hub = folder.parent.name == "snapshots"
    return [folder, folder.parent.parent / "blobs"] if hub else [folder]


def read_bytes(root: Path, name: str, limit_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Bytes of `name` in `root`, at most `limit_bytes`."""
    path = file_inside(root, name)
    size = path.stat().st_size
    if size > limit_bytes:
        raise CheckpointError(
            f"{name} has {size} bytes, more than the limit of {limit_bytes}", where=root.name
        )
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{name} cannot be read: {error.strerror}", where=root.name
        ) from error


def read_text(root: Path, name: str) -> str:
    """Text of a UTF-8 file."""
    try:
        return read_bytes(root, name).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name} is not UTF-8 text", where=root.name) from error


def read_json_object(root: Path, name: str) -> dict[str, Any]:
    """The JSON object in `name`; a repeated key, NaN or anything but an object is an error."""
    return parse_json_object(read_bytes(root, name), name)


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Strict JSON: UTF-8, one object, no repeated key, no NaN; CheckpointError naming `where`."""
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is not valid JSON: {shown(str(error))[1:-1]}",
            where=where,
            hint="the file is damaged or was cut short; fetch it again",
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} holds no JSON object", where=where)
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {shown(twice)} is given twice")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
