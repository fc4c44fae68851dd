"""The content-addressed compile cache: everything generated for one key, verified when reused.

In: a key and a function that generates into a folder. Out: the folder of the entry. Entries appear
whole (renamed into place), are checked against their checksums when found, and the oldest go.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from sitsc.core import env
from sitsc.core.artifact import PLAN, hash_file
from sitsc.core.disk import PARTIAL, reason_of, remove_leftovers
from sitsc.core.errors import CacheError
from sitsc.core.plan import Plan, read_plan

_SUMS = "checksums.json"
_MOST_ENTRIES = 64


@contextlib.contextmanager
def _cache_errors(root: Path) -> Iterator[None]:
    """Turn a full disk or a forbidden folder into an error for people."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot use the compile cache {root}: {reason_of(error)}",
            hint="set SITSC_CACHE to a folder with room",
        ) from error


def find(key: str) -> Path | None:
    """The entry of `key` when it is there and unaltered; a damaged one is removed."""
    entry = env.cache_dir() / key
    if not (entry / _SUMS).is_file():
        return None
    try:
        sums = json.loads((entry / _SUMS).read_text())
        intact = all(hash_file(entry / name).sha256 == value for name, value in sums.items())
    except (OSError, ValueError):
        intact = False
    if not intact:
        shutil.rmtree(entry, ignore_errors=True)
        return None
    os.utime(entry)
    return entry


def add(key: str, generate: Callable[[Path], None]) -> Path:
    """Generate the entry of `key` and return its folder. Raises CacheError."""
    root = env.cache_dir()
    with _cache_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root, PARTIAL)
        with tempfile.TemporaryDirectory(dir=root, prefix=PARTIAL) as work:
            folder = Path(work, "entry")
            folder.mkdir()
            generate(folder)
            names = [p for p in sorted(folder.rglob("*")) if p.is_file()]
            sums = {str(p.relative_to(folder)): hash_file(p).sha256 for p in names}
            (folder / _SUMS).write_text(json.dumps(sums))
            _move(folder, key)
        _drop_oldest(root)
    return root / key


def _move(folder: Path, key: str) -> None:
    """Put an entry into its place; an intact one that another process made stays."""
    try:
        os.replace(folder, env.cache_dir() / key)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if find(key) is None:
            os.replace(folder, env.cache_dir() / key)


def copy_code(entry: Path, to: Path) -> Plan:
    """Copy the files of an entry into an artifact folder; the plan that belongs to them."""
    sums = json.loads((entry / _SUMS).read_text())
    for name in sums:
        target = to / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry / name, target)
    return read_plan((to / PLAN).read_text())


def _drop_oldest(root: Path) -> None:
    """Drop the entries that were not used for longest; other folders are left alone."""
    entries = [path for path in root.iterdir() if (path / _SUMS).is_file()]
    entries.sort(key=lambda path: path.stat().st_mtime)
    for entry in entries[:-_MOST_ENTRIES]:
        shutil.rmtree(entry, ignore_errors=True)
