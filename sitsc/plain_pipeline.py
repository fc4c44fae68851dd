"""The pipeline of plain graphs and of modules in memory: graph → passes → plan → code → artifact.

`compile_plain` takes what any frontend made (modules here, ONNX elsewhere). Imports the passes and
so is imported late.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from sitsc import build_info
from sitsc.codegen import cpu
from sitsc.core import artifact as files
from sitsc.core.artifact import Artifact, ArtifactWriter, Manifest
from sitsc.core.canonical import canonical_json
from sitsc.core.errors import OptionError
from sitsc.core.hardware import TargetData, load_target
from sitsc.core.options import CompileOptions
from sitsc.core.packing import write_weights
from sitsc.core.plain import PlainGraph
from sitsc.core.plan import Numerics, Plan
from sitsc.core.records import to_value
from sitsc.core.reference import write_reference
from sitsc.core.weights import dtype_name
from sitsc.frontend.module import trace_plain
from sitsc.passes import PLAIN
from sitsc.passes.base import PassContext
from sitsc.passes.plain_planner import PACKAGE, linear_sizes, make_plain_plan
from sitsc.passes.planner import Workspace, weights_of
from sitsc.passes.runner import run_passes

Progress = Callable[[str, float], None]


def compile_plain_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    out: Path,
    options: CompileOptions,
    progress: Progress,
    dump: Path | None = None,
) -> Artifact:
    """Compile any module as a function of tensors. Raises SitscError."""
    check_plain_options(options)
    with ArtifactWriter(out) as writer:
        progress("trace", 0.0)
        plain = trace_plain(module, args, kwargs, dynamic_shapes)
        return compile_plain(plain, writer, options, progress, dump)


def check_plain_options(options: CompileOptions) -> TargetData:
    """The target. Raises OptionError for options that a graph in memory does not know."""
    data = load_target(options.target)
    if data.cuda is not None:
        raise OptionError(f"modules do not compile for {options.target} today", hint="target='cpu'")
    if options.weights != "none":
        raise OptionError(f"weights={options.weights!r} is for checkpoints", hint="leave it out")
    if options.pack is False:
        raise OptionError("pack=False: weights in memory must be packed", hint="leave it out")
    return data


def compile_plain(
    plain: PlainGraph,
    writer: ArtifactWriter,
    options: CompileOptions,
    progress: Progress,
    dump: Path | None = None,
) -> Artifact:
    """Passes, plan, code and weights of a plain graph into the artifact of `writer`."""
    data = check_plain_options(options)
    graph = plain.module.graph
    progress("passes", 0.0)
    dtype = main_dtype(graph)
    run_passes(
        plain.module, PLAIN, PassContext(dtype, "none", dtype, 16, options.target), dump=dump
    )
    constants = {cpu.weight_key(spec.name): spec.name for spec in weights_of(graph)}
    workspace = Workspace(_workspace(graph, plain.example_sizes), constants)
    numerics = Numerics(dtype, "none", "none", "float32", False, "nothing", ())
    plan = make_plain_plan(plain, numerics, data, workspace)
    progress("codegen", 0.0)
    with files.disk_errors(writer.out):
        cpu.generate(graph, writer.root, lambda share: progress("codegen", share), PACKAGE)
        write_reference(graph, writer.root)
    pack(plan, plain.read, writer, progress)
    return writer.finish(plan, manifest(plan))


def main_dtype(graph: fx.Graph) -> str:
    """The floating-point type of most weights, of the inputs where there are none."""
    counts: dict[torch.dtype, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        value: Tensor = node.meta["val"]
        if value.is_floating_point():
            share = value.numel() if "weight" in node.meta else 0
            counts[value.dtype] = counts.get(value.dtype, 0) + int(share)
    return dtype_name(max(counts, key=lambda key: counts[key])) if counts else "float32"


def _workspace(graph: fx.Graph, sizes: dict[str, int]) -> int:
    rows, columns = linear_sizes(graph, sizes)
    return cpu.workspace_bytes(
        tokens=rows, max_k=columns, max_n=64, seqs=1, q_heads=1, head_dim=64, max_context=1
    )


def pack(
    plan: Plan,
    read: Callable[[str, int, int], Tensor],
    writer: ArtifactWriter,
    progress: Progress,
) -> None:
    """Write every planned weight into the artifact."""
    specs = plan.model.parameters
    whole, done = max(1, sum(spec.nbytes for spec in specs)), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("pack", done / whole)

    with files.disk_errors(writer.out):
        index = write_weights(specs, read, writer.path(files.WEIGHTS), advance)
        writer.path(files.WEIGHTS_INDEX).write_text(canonical_json(to_value(index)))


def manifest(plan: Plan) -> Manifest:
    """The manifest of an artifact with its weights inside."""
    return Manifest(
        schema=files.SCHEMA,
        target=plan.target.name,
        plan=plan.sha256(),
        runs=plan.runs(),
        built_with=build_info.versions(),
        packed=True,
        checkpoint_hint="",
        files={},
    )
