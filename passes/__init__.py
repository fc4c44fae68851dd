"""sitsc.passes: passes over the FX graph, and what is computed from it; `order.py` says the order.

The tuples are imported when they are used: torch takes seconds, and the cost model needs none.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sitsc.passes.order import CPU as CPU
    from sitsc.passes.order import CPU_FUSED as CPU_FUSED
    from sitsc.passes.order import CPU_INT8 as CPU_INT8
    from sitsc.passes.order import CUDA as CUDA
    from sitsc.passes.order import CUDA_WIDE as CUDA_WIDE
    from sitsc.passes.order import FUSED as FUSED
    from sitsc.passes.order import MODULE as MODULE
    from sitsc.passes.order import PLAIN as PLAIN

if __name__ == "passes":
    raise ImportError("import this package as sitsc.passes, not as passes")


def __getattr__(name: str) -> Any:
    """A tuple of passes by its name."""
    if name.isupper() and not name.startswith("_"):
        return getattr(importlib.import_module("sitsc.passes.order"), name)
    raise AttributeError(f"module 'sitsc.passes' has no attribute {name!r}")
