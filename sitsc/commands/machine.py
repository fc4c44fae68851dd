"""The machine that something was measured on: hardware, versions, commit and date, as evidence."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "numpy", "tokenizers")


def hardware_name() -> str:
    """The machine as a user would name it: "2-core AMD EPYC"."""
    cores, model = 0, platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text().splitlines()
        cores = sum(line.startswith("processor") for line in lines)
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        model = names[0] if names else model
    return f"{cores}-core {model}" if cores else model


def commit() -> str:
    """The commit of the source tree, with "+" when it was changed.

    On a machine that got a copy the variable SITSC_COMMIT says it; "" where nothing does.
    """
    if told := os.environ.get("SITSC_COMMIT", ""):
        return told
    place = Path(__file__).resolve().parents[2]
    try:
        head = subprocess.run(
            ["git", "-C", str(place), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(place), "status", "--porcelain", "-uno"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def environment(on_gpu: bool = False) -> dict[str, Any]:
    """Hardware, versions, commit and date of a measurement: of this machine, or of its GPU."""
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    device: dict[str, str] = {}
    if on_gpu:
        from sitsc.runtime.cuda_measure import device_facts  # noqa: PLC0415  (where a GPU is)

        device = {name: value for name, value in device_facts().items() if value}
    return {
        "hardware": device.pop("hardware", "") or hardware_name(),
        "versions": {"python": platform.python_version(), **versions, **device},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
