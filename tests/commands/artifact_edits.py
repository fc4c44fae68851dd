"""Changing artifacts on purpose, with or without signing them again, for tests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sitsc.core.artifact import MANIFEST, PLAN, hash_file
from sitsc.core.canonical import canonical_json, digest
from sitsc.core.records import to_value


def copy(artifact: Path, to: Path) -> Path:
    """A copy of an artifact under another name and in another place."""
    return Path(shutil.copytree(artifact, to / "renamed"))


def flip_byte(path: Path, at: int) -> None:
    """Change one byte of a file, its size as before."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x01
    path.write_bytes(data)


def edit_manifest(root: Path, **changes: Any) -> None:
    """Write a manifest with other values, correctly signed."""
    value = json.loads((root / MANIFEST).read_text()) | changes
    rest = {key: item for key, item in value.items() if key != "digest"}
    (root / MANIFEST).write_text(canonical_json(rest | {"digest": digest(rest)}))


def edit_plan(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a plan with other values; the manifest names it correctly."""
    plan = json.loads((root / PLAN).read_text())
    change(plan)
    (root / PLAN).write_text(canonical_json(plan))
    files = json.loads((root / MANIFEST).read_text())["files"]
    files[PLAN] = to_value(hash_file(root / PLAN))
    edit_manifest(root, files=files, plan=files[PLAN]["sha256"])
