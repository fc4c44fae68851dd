"""Running graphs: seeded weights, step inputs, and the error measure."""

import math

import pytest
import torch
import torch.nn.functional as F
from graphs import HIDDEN, ROWS, node_of, table_graph
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from sitsc.core.interpret import (
    RandomTensors,
    relative_error,
    run_graph,
    step_inputs,
    tensor_shapes,
)

SHAPES = {"table": (ROWS, HIDDEN), "scale": (HIDDEN,)}


def test_a_graph_gives_what_its_formula_gives():
    graph, weights = table_graph(), RandomTensors(SHAPES)
    ids = torch.tensor([3, 0, 9, 3])
    table, scale = (weights.read(name, 0, shape[0]) for name, shape in SHAPES.items())
    wanted = F.rms_norm(table[ids], (HIDDEN,), scale, 1e-5) @ table.T
    out = run_graph(graph, weights, {"token_ids": ids, "not_read": torch.zeros(1)})
    torch.testing.assert_close(out, wanted)


def test_a_missing_input_is_an_error():
    with pytest.raises(KeyError):
        run_graph(table_graph(), RandomTensors(SHAPES), {})


def test_the_shapes_are_those_of_the_checkpoint():
    assert tensor_shapes(table_graph()) == SHAPES


def test_random_tensors_depend_on_name_shape_and_seed_alone():
    one, two = RandomTensors(SHAPES), RandomTensors(dict(reversed(SHAPES.items())))
    assert torch.equal(two.read("scale", 0, HIDDEN), one.read("scale", 0, HIDDEN))
    assert torch.equal(two.read("table", 2, 5), one.read("table", 0, ROWS)[2:5])
    other = RandomTensors(SHAPES, seed=1)
    assert not torch.equal(other.read("scale", 0, HIDDEN), one.read("scale", 0, HIDDEN))
    assert not torch.equal(
        RandomTensors({"a": (6,), "b": (6,)}).read("a", 0, 6),
        RandomTensors({"a": (6,), "b": (6,)}).read("b", 0, 6),
    )


@pytest.fixture(scope="module")
def table() -> fx.Graph:
    return table_graph()


@given(st.integers(1, 70), st.sampled_from([1, 4, 16]))
def test_a_step_has_pages_for_every_token(table: fx.Graph, tokens: int, page_tokens: int):
    values = step_inputs(table, list(range(tokens)), page_tokens)
    (pages,) = values["block_table"].tolist()
    assert len(pages) * page_tokens >= tokens > (len(pages) - 1) * page_tokens
    assert len(set(pages)) == len(pages)
    assert values["query_start"].tolist() == [0, tokens]
    assert values["context_lens"].tolist() == [0]
    assert values["position_ids"].tolist() == list(range(tokens))


def test_a_pool_is_big_enough_and_starts_as_nan():
    graph = table_graph()
    node = node_of(graph, "token_ids")
    with node.meta["val"].fake_mode:
        value = torch.empty(11, 3, 2, 2, 8 * 4, device=node.meta["val"].device)
    with graph.inserting_after(node):
        pool = graph.placeholder("kv_0")
    pool.meta |= {"input": "kv_0", "dims": ("pages", 3, 2, 2, 32), "val": value}
    values = step_inputs(graph, list(range(10)), 4)
    assert values["kv_0"].shape[1:] == (3, 2, 2, 32)
    assert int(values["block_table"].max()) < values["kv_0"].shape[0]
    assert bool(values["kv_0"].isnan().all())
    tight = step_inputs(graph, list(range(10)), 4, scatter=False)
    assert tight["block_table"].tolist() == [[0, 1, 2]]


def test_the_error_is_relative_to_the_largest_value():
    reference = torch.tensor([1.0, -4.0])
    assert relative_error(reference, reference) == 0.0
    assert relative_error(torch.tensor([1.0, -3.0]), reference) == 0.25
    assert relative_error(torch.tensor([[1.0, -3.0]]).bfloat16(), reference) == 0.25
    assert relative_error(torch.tensor([1.0]), reference) == math.inf
    for bad in (math.nan, math.inf):
        assert relative_error(torch.tensor([1.0, bad]), reference) == math.inf
