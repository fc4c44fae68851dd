"""The text of graphs: stable names, readable sizes, every kind of argument."""

from typing import Any

import torch
from torch import Tensor, nn

from sitsc.core.printer import Printer, print_graph, symbol_names, target_name
from sitsc.core.weights import TensorSlice, WeightSpec


class Model(nn.Module):
    """Reads its inputs in another order than it names them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.unread = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x * 1.5, self.weight)
        left, right = y.split([2, 3], -1)
        picked = torch.cat((left, right), -1)[rows]
        return picked.sum(0, keepdim=True, dtype=torch.float64)


def _graph() -> Any:
    tokens, rows = torch.export.Dim("any"), torch.export.Dim("name")
    program = torch.export.export(
        Model(),
        (torch.randn(9, 6), torch.tensor([1, 2, 0])),
        dynamic_shapes=({0: tokens}, {0: rows}),
        strict=False,
    )
    graph = program.run_decompositions({}).graph
    dims = {"x": ("tokens", 6), "rows": ("rows",)}
    for node in graph.find_nodes(op="placeholder"):
        if node.name in dims:
            node.meta |= {"input": node.name, "dims": dims[node.name]}
        else:
            name = node.name.removeprefix("p_")
            shape = tuple(node.meta["val"].shape)
            source = (TensorSlice(name, 0, shape[0]),)
            node.meta["weight"] = WeightSpec(name, "weight", source, shape, "float32", "plain", "")
    output: Any = graph.output_node()
    output.args = (output.args[0][0],)
    return graph


TEXT = """\
@weight: f32[5, 6] plain
x: f32[tokens, 6]
rows: i64[rows]
%0: f32[tokens, 6] = aten.mul.Tensor(x, 1.5)
%1: f32[tokens, 5] = aten.linear(%0, @weight)
%2: tuple = aten.split_with_sizes(%1, [2, 3], -1)
%3: f32[tokens, 2] = getitem(%2, 0)
%4: f32[tokens, 3] = getitem(%2, 1)
%5: f32[tokens, 5] = aten.cat([%3, %4], -1)
%6: f32[rows, 5] = aten.index.Tensor(%5, [rows])
%7: float64[1, 5] = aten.sum.dim_IntList(%6, [0], True, dtype=torch.float64)
return %7
"""


def test_every_line_of_a_small_graph():
    assert print_graph(_graph()) == TEXT


def test_names_of_nodes_and_symbols_do_not_matter():
    """The same graph traced again, after others took the first symbols and names."""
    graph = _graph()
    for index, node in enumerate(graph.nodes):
        node.name = f"other_{index}"
    assert print_graph(graph) == TEXT


def test_sizes_are_named_after_the_inputs():
    graph = _graph()
    assert sorted(symbol_names(graph).values()) == ["rows", "tokens"]
    (size, _) = graph.find_nodes(op="placeholder")[2].meta["val"].shape
    assert Printer(graph).size(size * 2 + 1) == "2*tokens + 1"


def test_a_node_without_value_is_still_printed():
    graph = _graph()
    node = next(n for n in graph.nodes if n.op == "call_function")
    del node.meta["val"]
    assert Printer(graph).line(node) == "%0 = aten.mul.Tensor(x, 1.5)"


def test_targets_keep_overloads_but_not_the_default():
    graph = _graph()
    names = [target_name(node) for node in graph.nodes if node.op == "call_function"]
    assert names[:4] == ["aten.mul.Tensor", "aten.linear", "aten.split_with_sizes", "getitem"]
