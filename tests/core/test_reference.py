"""The reference of an artifact: a graph written as JSON and read again computes the same."""

import json

import pytest
import torch

from sitsc.core.errors import ArtifactError
from sitsc.core.interpret import RandomTensors, run_graph, step_inputs
from sitsc.core.options import CompileOptions
from sitsc.core.reference import read_reference, reference_value
from sitsc.core.weights import materialise
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import Planned, inspect, plan_checkpoint

ONE = [{"value": 0}]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    root = write_random("tiny-llama", tmp_path_factory.mktemp("reference") / "model")
    options = CompileOptions(target="h200", max_batch=4, kv_tokens=4096)
    return plan_checkpoint(inspect(root, options), options)


def source(planned: Planned) -> RandomTensors:
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in planned.plan.model.parameters:
        for part in spec.sources:
            shapes[part.tensor] = (part.stop, *spec.shape[1:])
    return RandomTensors(shapes)


def test_it_computes_what_the_graph_computes(planned):
    value = json.loads(json.dumps(reference_value(planned.graph)))
    reference, tensors = read_reference(value), source(planned)
    specs = planned.plan.model.parameters
    weights = {spec.name: materialise(spec, tensors.read) for spec in specs}
    ids, page = [5, 6, 7, 8, 9, 10, 11], planned.plan.kv[0].page_tokens
    first, second = (step_inputs(planned.graph, ids, page) for _ in range(2))
    assert reference.weights == set(weights)
    found = reference.run(weights, second)
    assert torch.equal(found, run_graph(planned.graph, tensors, first))


def test_overrides_and_changes_reach_every_call(planned):
    reference, tensors = read_reference(reference_value(planned.graph)), source(planned)
    weights = {s.name: materialise(s, tensors.read) for s in planned.plan.model.parameters}
    inputs = step_inputs(planned.graph, [1, 2, 3], planned.plan.kv[0].page_tokens)
    seen: list[str] = []
    calls: list[int] = []

    def attention(q: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(len(rest))
        return torch.zeros(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype)

    def after(name: str, value: torch.Tensor) -> torch.Tensor:
        seen.append(name)
        return value

    overrides = {"sitsc.paged_attention.default": attention}
    assert reference.run(weights, inputs, overrides, after).isfinite().all()
    layers = sum(len(c.layers) for c in planned.plan.model.layer_classes)
    assert len(calls) == layers and set(seen) == reference.operators()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"schema": 0, "calls": [], "results": ONE},
        {"schema": 2, "calls": [], "results": ONE},
        {"schema": 2, "calls": [["os.system.default", ["ls"], {}]], "results": ONE},
        {"schema": 2, "calls": [["aten.no_such_thing.default", [], {}]], "results": ONE},
        {
            "schema": 2,
            "calls": [["aten.relu.default", [{"value": 0}], {}]],
            "results": [{"value": 0}],
        },
        {"schema": 2, "calls": [["relu", [], {}]], "results": ONE},
        {"schema": 2, "calls": 3, "results": ONE},
    ],
)
def test_anything_else_is_refused(value):
    with pytest.raises(ArtifactError, match=r"reference\.json"):
        read_reference(value)
