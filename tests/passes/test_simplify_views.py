"""Simplifying views: chains become one reshape, sizes need no computing, results stay."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modules import CONTEXT, execute, graph_of, names, rewritten
from torch import Tensor, fx, nn

from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.fxutil import aten, call
from sitsc.passes.runner import tidy
from sitsc.passes.simplify_views import SimplifyViews


class Views(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (lambda x: x.reshape(-1, 4, 6).reshape(-1, 24) + 0.5, ["add"]),
        (lambda x: x.reshape(1, -1, 4, 6)[0] + 0.5, ["reshape", "add"]),
        (lambda x: x.view(x.size(0), 2, -1).view(x.size(0), 3, 8) + 0.5, ["reshape", "add"]),
        (lambda x: x.unsqueeze(0).reshape(-1, 8) + 0.5, ["reshape", "add"]),
        (lambda x: x.reshape(-1, 4, 6).transpose(1, 2).reshape(-1, 24) + 0.5,
         ["reshape", "transpose", "reshape", "add"]),
        (lambda x: x.reshape(-1, 4, 6).select(1, 0) + 0.5, ["reshape", "select", "add"]),
        (lambda x: x.select(1, 3) + 0.5, ["select", "add"]),
    ],
)  # fmt: skip
def test_chains_of_views_become_one(body: Callable[[Tensor], Tensor], left: list[str]):

    graph = rewritten(
        Views(body), (torch.randn(7, 24),), Canonicalise(), SimplifyViews(), dims="tokens"
    )
    assert names(graph) == left


@pytest.fixture(scope="module")
def doubled() -> fx.GraphModule:
    """x [n, 24] times two."""
    return graph_of(Views(lambda x: x * 2.0), torch.randn(7, 24), dims="n")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.permutations([1, 2, 3, 4]), st.integers(0, 4)), min_size=1, max_size=5)
)
def test_any_chain_becomes_at_most_one_view(
    doubled: fx.GraphModule, chain: list[tuple[list[int], int]]
):
    graph, x = copy.deepcopy(doubled.graph), torch.randn(5, 24)
    output: Any = graph.output_node()
    node, wanted = output.args[0], x * 2.0
    with graph.inserting_before(output):
        for sizes, place in chain:
            shape = [*sizes[:place], -1, *sizes[place:]]
            node = call(graph, aten.reshape.default, (node, shape), node)
            wanted = wanted.reshape(shape)
    output.args = (node,)
    SimplifyViews().run(graph, CONTEXT)
    tidy(graph)
    assert names(graph).count("reshape") <= 1
    assert torch.equal(execute(graph, nn.Module(), x), wanted)
