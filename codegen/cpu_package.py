"""The AOTInductor package of the CPU target: the final graph in, one .pt2 file out.

The package holds code and no weights: every weight is a constant that the runtime points at its
own memory. Operators of ours with a kernel are called through C shims; the rest is compiled by
Inductor for a fixed instruction set, so that a package runs on machines other than its builder.
"""

import contextlib
import io
import logging
import os
import re
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from sitsc.codegen import cpu_shims
from sitsc.core.errors import CompileError
from sitsc.core.ops.linear import fused_linear_reference
from sitsc.core.ops.moe import experts_dense
from sitsc.core.ops.norm import glu_reference
from sitsc.core.ops.rope import rope_reference
from sitsc.core.quiet import quiet
from sitsc.core.weights import DTYPES, WeightSpec, materialise

MARCH = "x86-64-v3"
_SIMD_BITS = 256
_LITERAL_VALUES = 8
_KEPT = (torch.float32, torch.bfloat16, torch.int8)
_HINTS = {"tokens": 24, "rows": 7, "sequences": 5, "sequence_pages": 6, "pages": 11}


def inlined() -> dict[Any, Callable[..., Tensor]]:
    """Operators of ours without a kernel, and the torch code that Inductor compiles instead."""
    return {
        cpu_shims.overload("glu"): glu_reference,
        cpu_shims.overload("experts"): experts_dense,
        cpu_shims.overload("rope"): rope_reference,
    }


def dispatched() -> tuple[Any, ...]:
    """Operators that the package calls through torch's dispatcher: ranks speak in Python."""
    return (cpu_shims.overload("all_reduce"), cpu_shims.overload("all_gather"))


def weight_key(name: str) -> str:
    """The name of a weight as a constant of the package."""
    return "w_" + re.sub(r"\W", "_", name)


def _has_kernel(node: fx.Node) -> bool:
    if node.target is cpu_shims.overload("fused_linear"):
        return node.args[-1] != "plain"
    if node.target in (cpu_shims.overload("packed_embedding"), cpu_shims.overload("moe")):
        return node.args[-1] != "plain"
    return node.target in cpu_shims.declarations() or node.target in dispatched()


def _target(node: fx.Node) -> Any:
    if getattr(node.target, "namespace", "") != "sitsc" or _has_kernel(node):
        return node.target
    if node.target is cpu_shims.overload("fused_linear"):
        return fused_linear_reference
    if node.target is cpu_shims.overload("packed_embedding"):
        return None
    if node.target not in inlined():
        raise CompileError(f"{node.target} has no CPU kernel and cannot be inlined")
    return inlined()[node.target]


def cpu_module(graph: fx.Graph) -> fx.GraphModule:
    """The graph as a module on the CPU; its weights are buffers that are never touched."""
    root, new = nn.Module(), fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and "weight" in node.meta:
            key = weight_key(node.meta["weight"].name)
            if hasattr(root, key):
                raise CompileError(f"two weights would both be called {key}")
            root.register_buffer(key, _placeholder(node.meta["weight"]))
            env[node] = new.get_attr(key)
        elif node.op == "call_function":
            env[node] = _copy_call(new, node, env)
            if _is_shared(node):
                env[node] = new.call_function(cpu_shims.overload("keep"), (env[node],))
        else:
            env[node] = new.node_copy(node, lambda n: env[n])
    return fx.GraphModule(root, new)


def _is_shared(node: fx.Node) -> bool:
    """Whether Inductor would compute this value anew for each of the kernels that read it."""
    value, kernels = node.meta.get("val"), cpu_shims.declarations()
    if node.target in kernels or not isinstance(value, Tensor) or not value.is_contiguous():
        return False
    if value.dtype not in _KEPT or value.dim() == 0:
        return False
    return sum(user.target in kernels for user in node.users) > 1


def _placeholder(spec: WeightSpec) -> Tensor:
    """What stands for a weight while compiling: its shape, and its values when they are known.

    Inductor writes vectors of up to eight values into the code, so those must be known here.
    """
    if spec.role == "constant":
        return materialise(spec, lambda name, start, stop: torch.empty(0))
    if len(spec.stored_shape) == 1 and spec.stored_shape[0] <= _LITERAL_VALUES:
        raise CompileError(
            f"weight {spec.name} has only {spec.stored_shape[0]} values",
            hint="models this small are compiled for tests only; use a hidden size above 8",
        )
    return torch.empty(spec.stored_shape, dtype=DTYPES[spec.dtype])


def _copy_call(new: fx.Graph, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    copied = new.node_copy(node, lambda n: env[n])
    target = _target(node)
    if target is None:
        copied.target = torch.ops.aten.embedding.default
        copied.args = (copied.args[1], copied.args[0])
    else:
        copied.target = target
    if copied.kwargs.get("device") is not None:
        copied.kwargs = {**copied.kwargs, "device": torch.device("cpu")}
    return copied


def example_inputs(graph: fx.Graph) -> tuple[list[Tensor], dict[str, Any]]:
    """Example inputs in the order of the graph, and what torch.export may vary of each.

    Inputs of a plain graph bring the sizes of an example; those of a step have names known here.
    """
    dims = {name: torch.export.Dim(name, min=1) for name in _HINTS}
    dims["sequences+1"] = dims["sequences"] + 1
    hints = _HINTS | {"sequences+1": _HINTS["sequences"] + 1}
    inputs, moving = [], {}
    for node in graph.nodes:
        if node.op != "placeholder" or "input" not in node.meta:
            continue
        if (example := node.meta.get("example")) is not None:
            inputs.append(torch.zeros(example, dtype=node.meta["val"].dtype))
            free = [i for i, d in enumerate(node.meta["dims"]) if isinstance(d, str)]
            moving[node.name] = dict.fromkeys(free, torch.export.Dim.DYNAMIC)
            continue
        shape = [hints[d] if isinstance(d, str) else d for d in node.meta["dims"]]
        inputs.append(torch.zeros(shape, dtype=node.meta["val"].dtype))
        moving[node.name] = {i: dims[d] for i, d in enumerate(node.meta["dims"]) if d in dims}
    return inputs, moving


def compile_package(graph: fx.Graph, out_path: Path) -> None:
    """Compile the final `graph` to `out_path` (.pt2). Raises CompileError; writes whole or not."""
    module = cpu_module(graph)
    inputs, moving = example_inputs(graph)
    settings = {
        "aot_inductor.package_constants_in_so": False,
        "aot_inductor.custom_ops_to_c_shims": cpu_shims.declarations(),
        "cpp.march": MARCH,
        "cpp.simdlen": _SIMD_BITS,
        "cpp.threads": -1,
        "compile_threads": 1,
    }
    out_path = Path(out_path).absolute()
    with tempfile.TemporaryDirectory(dir=out_path.parent, prefix=".pt2_") as folder:
        target = Path(folder, "step.pt2")
        try:
            with quiet(logging.WARNING), torch.no_grad(), contextlib.redirect_stderr(io.StringIO()):
                program = torch.export.export(
                    module, tuple(inputs), strict=False, dynamic_shapes=moving
                )
                _check_sizes(program, graph)
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(target), inductor_configs=settings
                )
        except Exception as error:
            line = str(error).strip().splitlines() or [type(error).__name__]
            raise CompileError(f"AOTInductor failed: {line[0][:300]}") from error
        _copy_without_sources(target, Path(folder, "small.pt2"))
        os.replace(Path(folder, "small.pt2"), out_path)


def _check_sizes(program: Any, graph: fx.Graph) -> None:
    """Raise CompileError where free sizes of a plain graph became others: they must stay as named.

    Two sizes that the compiler would take for one, or one that it would bound, give wrong results.
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder" and "input" in node.meta]
    names: dict[str, str] = {}
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    for node, key in zip(inputs, program.graph_signature.user_inputs, strict=True):
        for size, dim in zip(values[key].shape, node.meta["dims"], strict=True):
            known = names.setdefault(str(size), str(dim))
            if "example" in node.meta and known != str(dim):
                raise CompileError(f"sizes {known} and {dim} of the inputs became one")


def _copy_without_sources(package: Path, out: Path) -> None:
    """Copy a package but for the generated C++, which nothing reads and which tells build paths."""
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            if not name.endswith(".cpp"):
                new.writestr(zipfile.ZipInfo(name), old.read(name))  # dated 1980, stored
