"""The planner of plain graphs: one regime, one package, inputs and outputs by name.

In: a `PlainGraph` after its passes. Out: a `Plan` of kind "plain" with no pages and no schedule;
predictions and memory are those of the example inputs. Reads no weight and no file.
"""

from typing import Any

from torch import fx

from sitsc.core.hardware import TargetData
from sitsc.core.plain import PlainGraph, PlainOutput
from sitsc.core.plan import (
    PLAIN,
    SCHEMA,
    ArenaBuffer,
    Argument,
    Launch,
    LaunchGroup,
    Memory,
    Model,
    Numerics,
    Package,
    Parallel,
    Plan,
    Prediction,
    Rank,
    Regime,
    Schedule,
    Tier,
    Tokens,
)
from sitsc.core.printer import Printer, symbol_names
from sitsc.core.weights import dtype_name
from sitsc.passes.cost import Sizes
from sitsc.passes.fxutil import arguments, calls, tensor
from sitsc.passes.layers import layer_classes
from sitsc.passes.memory import aligned, graph_buffers, plan_arena
from sitsc.passes.planner import Workspace, weights_of, with_calibration
from sitsc.passes.schedule import PACKAGE_GROUP, kernel_rows

PACKAGE = "module"


def make_plain_plan(
    plain: PlainGraph, numerics: Numerics, data: TargetData, workspace: Workspace
) -> Plan:
    """The plan of a plain graph on one device."""
    data = with_calibration(data)
    graph, target = plain.module.graph, data.target
    classes = layer_classes(graph)
    sizes = Sizes(symbol_names(graph), plain.example_sizes)
    rows = kernel_rows(graph, sizes, classes, target)
    time = sum(row.predicted_us for row in rows)
    launch = Launch(
        kind="package",
        kernel=PACKAGE,
        template="aotinductor",
        tile={},
        grid=(target.threads,),
        arguments=plain_inputs(graph),
        outputs=_outputs(graph, plain.outputs),
        stream=0,
        dependent=False,
        bytes=sum(row.bytes for row in rows),
        flops=sum(row.flops for row in rows),
        predicted_us=time,
    )
    group = LaunchGroup(PACKAGE_GROUP, (), (launch,))
    return Plan(
        schema=SCHEMA,
        model=Model(plain.name, PLAIN, _bounds(plain), classes, weights_of(graph)),
        tokens=Tokens(0, 0, None, False, (), 0),
        target=target,
        parallel=Parallel(1, 1, 1, 1, 1, 0, ()),
        regimes=(Regime(PLAIN, PLAIN, dict(plain.example_sizes), (group,), rows, time),),
        packages=(Package(PACKAGE, f"cpu/{PACKAGE}.pt2", workspace.constants),),
        ranks=(Rank(0, 0, 0),),
        kv=(),
        memory=_memory(graph, sizes, workspace),
        schedule=Schedule((), (), 0, 0, 0, 1),
        numerics=numerics,
        predictions={PLAIN: Prediction(time / 1e3, "ms", data.prediction_error)},
    )


def plain_inputs(graph: fx.Graph) -> tuple[Argument, ...]:
    """The inputs of a graph in order, as arguments of the package."""
    found = []
    for node in graph.nodes:
        if node.op == "placeholder" and "input" in node.meta:
            name, dtype = node.meta["input"], dtype_name(tensor(node).dtype)
            found.append(Argument(name, "input", name, dtype, node.meta["dims"]))
    return tuple(found)


def results(graph: fx.Graph) -> tuple[Any, ...]:
    """The nodes that a graph returns."""
    value: Any = graph.output_node().args[0]
    return value if isinstance(value, tuple) else (value,)


def _outputs(graph: fx.Graph, outputs: tuple[PlainOutput, ...]) -> tuple[Argument, ...]:
    printer, nodes = Printer(graph), iter(results(graph))
    found = []
    for output in outputs:
        dtype, shape = "none", ()
        if not output.is_none:
            value = tensor(next(nodes))
            dtype = dtype_name(value.dtype)
            shape = tuple(s if isinstance(s, int) else printer.size(s) for s in value.shape)
        found.append(Argument(output.name, output.place, output.name, dtype, shape))
    return tuple(found)


def _bounds(plain: PlainGraph) -> dict[str, int]:
    bounds = {}
    for name, (least, most) in sorted(plain.ranges.items()):
        bounds[f"{name}_min"] = least
        if most:
            bounds[f"{name}_max"] = most
    return bounds


def _memory(graph: fx.Graph, sizes: Sizes, workspace: Workspace) -> Memory:
    scratch = ArenaBuffer("workspace", "uint8", (workspace.bytes,), 0, workspace.bytes, 0, 0)
    arena = plan_arena([scratch])
    inside = plan_arena(graph_buffers(graph, sizes))
    weights = sum(aligned(spec.nbytes) for spec in weights_of(graph))
    return Memory(
        weights_bytes=weights,
        arena_bytes=arena.bytes,
        arena=arena.buffers,
        kv_pages=0,
        kv_bytes=0,
        package_bytes=inside.bytes,
        graph_bytes=0,
        slack_bytes=0,
        total_bytes=weights + arena.bytes + inside.bytes,
        tiers=(
            Tier("weights", "host", "read from the artifact into one block of huge pages"),
            Tier("arena", "host", "kernels' scratch, grown for inputs larger than the examples"),
        ),
    )


def linear_sizes(graph: fx.Graph, example_sizes: dict[str, int]) -> tuple[int, int]:
    """(most rows, longest row) that a linear layer reads with the example inputs."""
    sizes = Sizes(symbol_names(graph), example_sizes)
    rows, columns = 1, 64
    for node in calls(graph, "fused_linear"):
        x = arguments(node)["x"]
        width = int(tensor(x).shape[-1])
        rows, columns = max(rows, sizes.elements(x) // max(1, width)), max(columns, width)
    return rows, columns
