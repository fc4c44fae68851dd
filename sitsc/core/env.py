"""The one reader of environment variables: every variable of ours, its type and its default."""

import os
from pathlib import Path

from sitsc.core.errors import EnvironmentValueError


def cache_dir() -> Path:
    """Folder of the content-addressed compile cache (`SITSC_CACHE`, default ~/.cache/sitsc)."""
    value = os.environ.get("SITSC_CACHE", "")
    return Path(value).expanduser() if value else Path.home() / ".cache" / "sitsc"


def num_threads() -> int | None:
    """CPU threads for the runtime (`SITSC_THREADS`); None leaves the choice to the runtime."""
    value = os.environ.get("SITSC_THREADS", "")
    if not value:
        return None
    if not value.isdigit() or int(value) < 1:
        raise EnvironmentValueError(
            f"SITSC_THREADS={value!r} is not a positive whole number",
            hint="unset it or set it to the number of cores",
        )
    return int(value)


def local_rank() -> int:
    """Which of the GPUs of this host is this process's own (`LOCAL_RANK`, default 0)."""
    value = os.environ.get("LOCAL_RANK", "0") if launched_rank() is not None else "0"
    if not value.isdigit():
        raise EnvironmentValueError(
            f"LOCAL_RANK={value!r} is not a whole number", hint="start by torchrun"
        )
    return int(value)


def launched_rank() -> str | None:
    """The number that `torchrun` or `sitsc run --nproc` gave this process, None without either."""
    return os.environ.get("RANK") if "WORLD_SIZE" in os.environ else None
