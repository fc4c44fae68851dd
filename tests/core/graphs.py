"""A small graph of ours, for tests of the verifier and the interpreter."""

from typing import Any

import torch
from torch import Tensor, fx, nn

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core.weights import TensorSlice, WeightSpec

ROWS, HIDDEN = 10, 6


class Table(nn.Module):
    """Rows of a table, normalised and multiplied with the table again."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, HIDDEN))
        self.scale = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, token_ids: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(token_ids, self.table)
        y = torch.ops.sitsc.rms_norm(x, self.scale, 1e-5, 0.0)
        return torch.nn.functional.linear(y, self.table)


def table_graph() -> fx.Graph:
    """token_ids [tokens] to [tokens, ROWS]; weights "table" and "scale"."""
    program = torch.export.export(
        Table(),
        (torch.tensor([1, 2, 0]),),
        dynamic_shapes=({0: torch.export.Dim("tokens")},),
        strict=False,
    )
    graph = program.run_decompositions({}).graph
    for node in graph.find_nodes(op="placeholder"):
        if node.name == "token_ids":
            node.meta |= {"input": "token_ids", "dims": ("tokens",)}
            continue
        name, shape = node.name.removeprefix("p_"), tuple(node.meta["val"].shape)
        source = (TensorSlice(name, 0, shape[0]),)
        node.meta["weight"] = WeightSpec(name, "weight", source, shape, "float32", "plain", "")
    output: Any = graph.output_node()
    output.args = (output.args[0][0],)
    return graph


def node_of(graph: fx.Graph, name: str) -> Any:
    """The first node whose target or name contains `name`."""
    return next(n for n in graph.nodes if name in str(n.target) or name == n.name)
