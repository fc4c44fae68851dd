"""Starting the GPU while Python still imports: a context takes as long as a library.

In: an artifact folder. Out: a thread that opens the device, or none for other targets. Whatever
goes wrong here is found again, and told, when the artifact is loaded. Imports nothing heavy.
"""

import contextlib
import json
import threading
from pathlib import Path

from sitsc.core import env
from sitsc.core.errors import SitscError
from sitsc.runtime import cuda_driver

_MANIFEST = "manifest.json"


def warm_up(artifact: Path) -> threading.Thread | None:
    """Open the GPU in the background when the artifact is for one."""
    if not _for_gpu(artifact):
        return None
    thread = threading.Thread(target=_open)
    thread.start()
    return thread


def _for_gpu(artifact: Path) -> bool:
    try:
        value = json.loads((artifact / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    target = value.get("target") if isinstance(value, dict) else None
    return isinstance(target, str) and target != "cpu"


def _open() -> None:
    with contextlib.suppress(SitscError):
        cuda_driver.open_device(env.local_rank())
