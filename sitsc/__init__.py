"""sitsc: an ahead-of-time compiler and runtime for large language models."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sitsc.api import Compiled as Compiled
    from sitsc.api import compile as compile
    from sitsc.api import export_onnx as export_onnx
    from sitsc.api import load as load

__version__ = "0.1.0"

# The OpenMP runtime reads this once, when torch loads it, so it must be set before. By default a
# thread that waits spins for milliseconds; where another process holds a core, each of the 150
# parallel regions of a token then waits that long (measured: 1.8 s a token instead of 24 ms).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def __getattr__(name: str) -> Any:
    """The Python API (docs/python-api.md), imported when it is used: torch takes a second."""
    if name in ("compile", "load", "export_onnx", "Compiled"):
        return getattr(importlib.import_module("sitsc.api"), name)
    raise AttributeError(f"module 'sitsc' has no attribute {name!r}")
