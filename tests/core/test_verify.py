"""The verifier: broken graphs are refused, and the error shows the node and what surrounds it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import node_of, table_graph
from torch import fx

from sitsc.core.errors import GraphError
from sitsc.core.verify import verify_graph


def _fails(graph: fx.Graph, match: str) -> str:
    """The note of the error."""
    with pytest.raises(GraphError, match=match) as error:
        verify_graph(graph, "some_pass")
    assert "[after some_pass]" in str(error.value)
    return "\n".join(getattr(error.value, "__notes__", []))


def test_a_whole_graph_passes():
    verify_graph(table_graph(), "tracing")


def _fake(node: Any, change: Callable[[Any], Any]) -> None:
    value = node.meta["val"]
    with value.fake_mode:
        node.meta["val"] = change(value)


def test_a_wrong_dtype_is_shown_with_its_surroundings():
    graph = table_graph()
    _fake(node_of(graph, "rms_norm"), lambda v: v.to(torch.bfloat16))
    note = _fails(graph, "computes torch.float32, says torch.bfloat16 at %1")
    lines = note.splitlines()
    assert "%1: bf16[tokens, 6] = sitsc.rms_norm(%0, @scale, 1e-05, 0)" in lines
    assert lines[0].startswith("@table")  # five lines before …
    assert lines[-1] == "return %2"  # … and after


def test_a_wrong_shape_is_told():
    graph = table_graph()
    _fake(node_of(graph, "linear"), lambda v: v[:, :-1])
    _fails(graph, r"computes \[.*, 10\], says \[.*, 9\]")


@pytest.mark.parametrize("name", ["embedding", "table", "token_ids"])
def test_a_missing_value_is_told(name: str):
    graph = table_graph()
    del node_of(graph, name).meta["val"]
    assert "rms_norm" in _fails(graph, "no value")


def test_a_value_that_is_no_tensor_is_told():
    graph = table_graph()
    node_of(graph, "embedding").meta["val"] = 3
    _fails(graph, "computes torch.float32, says 3")


def test_an_undeclared_placeholder_is_told():
    graph = table_graph()
    del node_of(graph, "token_ids").meta["input"]
    _fails(graph, "a placeholder is a weight or a step input")


def test_a_placeholder_cannot_be_both():
    graph = table_graph()
    node = node_of(graph, "token_ids")
    node.meta["weight"] = node_of(graph, "table").meta["weight"]
    _fails(graph, "a placeholder is a weight or a step input")


def test_a_step_input_names_each_dimension():
    graph = table_graph()
    node_of(graph, "token_ids").meta["dims"] = ("tokens", 3)
    _fails(graph, "names each of its dimensions")


def test_a_weight_has_the_planned_shape():
    graph = table_graph()
    node = node_of(graph, "table")
    node.meta["weight"] = replace(node.meta["weight"], format="n16")
    _fails(graph, r"shape \(10, 6\), planned \(1, 6, 16\)")


@pytest.mark.parametrize("returned", [(), (3,), None])
def test_a_graph_returns_a_tensor_or_a_tuple_of_them(returned: Any):
    graph = table_graph()
    output: Any = graph.output_node()
    output.args = ((output.args[0], output.args[0]),)
    verify_graph(graph, "here")
    output.args = (returned,)
    _fails(graph, "one tensor or a tuple")


def test_only_calls_are_allowed():
    graph = table_graph()
    with graph.inserting_before(node_of(graph, "rms_norm")):
        graph.call_method("sum", (node_of(graph, "embedding"),))
    _fails(graph, "unexpected node kind call_method")


def test_uses_before_definitions_are_refused():
    graph = table_graph()
    node_of(graph, "embedding").prepend(node_of(graph, "linear"))
    _fails(graph, "used before it has been defined")
