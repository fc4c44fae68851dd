"""Everything generated for the CPU target: kernels, shims and the package, into one folder.

In: the final graph. Out: cpu/kernels.so, cpu/shims.so, cpu/step.pt2 and the kernels' rendered
source. The libraries are the same for every model, so they have a cache entry of their own.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from sitsc.codegen import cpu_kernels, cpu_shims, cxx
from sitsc.codegen.cpu_package import compile_package, weight_key
from sitsc.core import build_cache
from sitsc.core.canonical import digest

__all__ = ["SPEC", "generate", "libraries", "moe_bytes", "weight_key", "workspace_bytes"]

SPEC = cpu_kernels.KernelSpec()


def workspace_bytes(**sizes: int) -> int:
    """Scratch bytes that the kernels need at these sizes; see cpu_kernels.workspace_bytes."""
    return cpu_kernels.workspace_bytes(SPEC, **sizes)


def moe_bytes(node: fx.Node, tokens: int) -> int:
    """Scratch bytes of one sitsc::moe call with this many tokens."""
    names = [a.name for a in cpu_shims.overload("moe")._schema.arguments]
    a: dict[str, Any] = dict(zip(names, node.args, strict=True))
    return cpu_kernels.moe_workspace_bytes(
        tokens=tokens,
        top_k=a["top_k"],
        experts=int(a["logits"].meta["val"].shape[-1]),
        hidden=int(a["x"].meta["val"].shape[-1]),
        intermediate=a["intermediate"],
    )


def generate(
    graph: fx.Graph, folder: Path, progress: Callable[[float], None], package: str = "step"
) -> None:
    """Compile everything into folder/cpu. Raises CompileError."""
    target = folder / "cpu"
    target.mkdir(parents=True, exist_ok=True)
    made = libraries()
    for name in ("kernels.so", "shims.so"):
        shutil.copyfile(made / name, target / name)
    for name, text in cpu_kernels.render(SPEC).items():
        path = target / "source" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    progress(0.3)
    compile_package(graph, target / f"{package}.pt2")
    progress(1.0)


def libraries() -> Path:
    """The folder of kernels.so and shims.so, compiled unless the cache has them.

    Raises CompileError and CacheError. The folder belongs to the cache: read it.
    """
    sources = cpu_kernels.render(SPEC) | cpu_shims.render()
    key = digest([sources, cxx.compiler_version(), torch.__version__, *map(str, cpu_kernels.FLAGS)])
    return build_cache.find(key) or build_cache.add(key, _compile_libraries)


def _compile_libraries(folder: Path) -> None:
    cpu_kernels.compile_library(cpu_kernels.render(SPEC), folder / "kernels.so")
    cpu_shims.compile_shims(folder / "shims.so")
