"""Small modules as graphs of ours, for tests that need a graph of a certain form."""

from typing import Any

import torch
from torch import Tensor, fx, nn

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core.interpret import run_graph
from sitsc.core.weights import TensorSlice, WeightSpec, dtype_name
from sitsc.frontend.bind import drop_assertions
from sitsc.passes.base import Pass, PassContext
from sitsc.passes.runner import run_passes

CONTEXT = PassContext("float32", "none", "float32", 16, "cpu")


class Weights:
    """The parameters of a module as a source of checkpoint rows."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors = dict(module.named_parameters())

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return self.tensors[name].detach()[start:stop]


def graph_of(module: nn.Module, *inputs: Tensor, dims: Any = None) -> fx.GraphModule:
    """The graph of `module(*inputs)`; dimension 0 of every input moves when `dims` names it."""
    moving = None
    if dims is not None:
        moving = tuple({0: torch.export.Dim(dims, min=1)} for _ in inputs)
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=moving, strict=False)
        program = program.run_decompositions({})
    kinds: dict[str, Any] = {s.arg.name: s.target for s in program.graph_signature.input_specs}
    graph = program.graph
    for node in graph.find_nodes(op="placeholder"):
        value, name = node.meta["val"], kinds[node.name]
        if name is None:
            names = [size if isinstance(size, int) else str(dims) for size in value.shape]
            node.meta |= {"input": node.name, "dims": tuple(names)}
        else:
            shape = tuple(value.shape)
            source = (TensorSlice(name, 0, shape[0]),)
            kind = dtype_name(value.dtype)
            node.meta["weight"] = WeightSpec(name, "weight", source, shape, kind, "plain", "")
    drop_assertions(graph)
    output: Any = graph.output_node()
    output.args = (output.args[0][0],)
    return fx.GraphModule(nn.Module(), graph)


def execute(graph: fx.Graph, module: nn.Module, *inputs: Tensor) -> Tensor:
    """The graph on `inputs` in the order of its step inputs, with the module's parameters."""
    nodes = graph.find_nodes(op="placeholder")
    names = [node.meta["input"] for node in nodes if "input" in node.meta]
    return run_graph(graph, Weights(module), dict(zip(names, inputs, strict=False)))


def rewritten(
    module: nn.Module, inputs: tuple[Tensor, ...], *passes: Pass, dims: Any = None
) -> fx.Graph:
    """The graph after `passes`, which must compute what the module computes."""
    graph = graph_of(module, *inputs, dims=dims)
    run_passes(graph, passes, CONTEXT)
    with torch.no_grad():
        wanted = module(*inputs)
    torch.testing.assert_close(execute(graph.graph, module, *inputs), wanted, atol=1e-5, rtol=1e-5)
    return graph.graph


def names(graph: fx.Graph) -> list[str]:
    """The operators that a graph calls, in order, without namespace and overload."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            found.append(schema.name.split("::")[1] if schema else node.target.__name__)
    return found
