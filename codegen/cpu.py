"""Everything generated for the CPU target: kernels, shims and the package, into one folder.

In: the final graph. Out: cpu/kernels.so, cpu/shims.so, cpu/step.pt2 and the kernels' rendered source.
"""

from collections.abc import Callable
from pathlib import Path

from torch import fx

from sitsc.codegen import cpu_kernels, cpu_shims
from sitsc.codegen.cpu_package import compile_package, weight_key

__all__ = ["SPEC", "generate", "weight_key", "workspace_bytes"]

SPEC = cpu_kernels.KernelSpec()


def workspace_bytes(**sizes: int) -> int:
    """Scratch bytes that the kernels need at these sizes; see cpu_kernels.workspace_bytes."""
    return cpu_kernels.workspace_bytes(SPEC, **sizes)


def generate(graph: fx.Graph, folder: Path, progress: Callable[[float], None]) -> None:
    """Compile everything into folder/cpu. Raises CompileError."""
    target = folder / "cpu"
    target.mkdir(parents=True, exist_ok=True)
    sources = cpu_kernels.render(SPEC)
    cpu_kernels.compile_library(sources, target / "kernels.so")
    progress(0.3)
    cpu_shims.compile_shims(target / "shims.so")
    progress(0.35)
    compile_package(graph, target / "step.pt2")
    progress(1.0)
