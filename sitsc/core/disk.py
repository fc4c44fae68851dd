"""Writing to disks that may be full or forbidden, and clearing what killed processes left there."""

import contextlib
import errno
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from sitsc.core.errors import ArtifactError

PARTIAL = ".partial-"  # in the name of a folder that is still being written
_LEFT_AFTER_S = 24 * 3600
_REASONS = {errno.ENOSPC: "the disk is full", errno.EACCES: "no permission to write"}


def reason_of(error: OSError) -> str:
    """Why the disk refused, in words."""
    return _REASONS.get(error.errno or 0, error.strerror or str(error))


@contextlib.contextmanager
def disk_errors(out: Path, hint: str = "nothing was left behind") -> Iterator[None]:
    """Turn a full disk or a forbidden folder into an error for people."""
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"cannot write {out}: {reason_of(error)}", hint=hint) from error


def remove_leftovers(folder: Path, prefix: str) -> None:
    """Remove partial folders named `prefix`… that nobody has written to for a day.

    A process that was killed leaves one; a younger one may belong to a process that still runs.
    """
    oldest = time.time() - _LEFT_AFTER_S
    for path in folder.iterdir():
        if not path.name.startswith(prefix) or path.is_symlink() or not path.is_dir():
            continue
        with contextlib.suppress(OSError):  # another process removes it as well
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)
