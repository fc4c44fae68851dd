"""Our decomposition of exported programs gives the graphs of torch's own."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from sitsc.frontend import trace
from sitsc.frontend.decompose import decomposed
from tests.compiled_families import FAMILIES

FAST = ("llama3_scaled", "gpt2", "cohere", "mixtral", "gpt_oss")  # what each has: see below


def text(graph: fx.Graph) -> list[str]:
    """Every node but for its name and for assertions, with its shape."""
    numbers: dict[fx.Node, str] = {}
    found = []
    for node in graph.nodes:
        if "_assert" in str(node.target):
            continue
        numbers[node] = f"%{len(numbers)}"
        inputs = fx.map_arg((node.args, node.kwargs), lambda one: numbers[one])
        value = node.meta.get("val")
        shape = (list(value.shape), value.dtype) if isinstance(value, Tensor) else value
        found.append(f"{node.op} {node.target} {inputs} {shape}")
    return found


def exported(module: nn.Module) -> Any:
    shapes, x = ({0: torch.export.Dim("rows", min=1)},), torch.randn(5, 6)
    with torch.no_grad():
        return torch.export.export(module.eval(), (x,), strict=False, dynamic_shapes=shapes)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in FAST else pytest.mark.slow) for f in FAMILIES]
)
def test_models_of_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts and reshapes, dropout and split, flattened halves, a sum that is divided in place."""
    texts: list[list[str]] = []

    def both(program: Any) -> Any:
        whole = program.run_decompositions({})
        ours = decomposed(program)
        assert ours is program or family == "deepseek_v3"  # it writes into a tensor of zeros
        texts.extend(text(one.graph) for one in (whole, ours))
        return ours

    monkeypatch.setattr(trace, "decomposed", both)
    trace.trace(FAMILIES[family], torch.bfloat16)
    assert texts[0] == texts[1]


class Function(nn.Module):
    """A function of a tensor [rows, 6] as a module, with a buffer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.ones(6))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def divided(module: Any, x: Tensor) -> Tensor:
    y = x.exp()
    total = y.sum(-1, keepdim=True)
    y /= total
    return y.to(torch.float64) + y.to(torch.float32)


SIMPLE = {
    "casts": lambda m, x: x.to(torch.float32).to(torch.float16).type_as(x).to("cpu").contiguous(),
    "chunks": lambda m, x: torch.cat(
        [b - a for a, b in zip(x.chunk(3, -1), x.split(2, -1), strict=True)]
    ),
    "sizes": lambda m, x: (
        torch.stack((x, x), -1).flatten(-2).view(x.shape[0], -1).unflatten(1, (2, 6))
    ),
    "dropped": lambda m, x: (
        nn.functional.dropout(x, 0.5, m.training) + nn.functional.layer_norm(x, (6,))
    ),
    "unused": lambda m, x: (x.reshape(-1), x * 2)[1],
    "selected": lambda m, x: nn.functional.pad(x.narrow(1, 1, 3).matmul(m.state[:3]), (1, 2)),
    "divided": divided,
}


@pytest.mark.parametrize("name", SIMPLE)
def test_operators(name: str) -> None:
    program = exported(Function(SIMPLE[name]))
    whole, ours = text(copy.deepcopy(program).run_decompositions({}).graph), decomposed(program)
    assert ours is program
    assert text(ours.graph) == whole


def twice(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    before = y + 1
    y.mul_(2)
    y.add_(before)
    return y, y.reshape(-1)


def over_a_narrower_sum(module: Any, x: Tensor) -> Tensor:
    y = x.to(torch.bfloat16).exp()
    y += x
    return y


def to_a_size_of_its_own(module: Any, x: Tensor) -> Tensor:
    return (x[:, None] * module.state).expand_as(x[:, None])


def into_a_view(module: Any, x: Tensor) -> Tensor:
    y = x.exp()
    y[:, 0] = 0
    return y


def over_what_has_a_view(module: Any, x: Tensor) -> Tensor:
    y = x.exp()
    first = y[:, :2]
    y.mul_(2)
    return first + y[:, 2:4]


def over_an_input(module: Any, x: Tensor) -> Tensor:
    return x.mul_(2) + 1


def over_a_buffer(module: Any, x: Tensor) -> Tensor:
    module.state.add_(1)
    return x + module.state


def over_a_cast_that_is_none(module: Any, x: Tensor) -> Tensor:
    return x.to(x.dtype).mul_(2)


@pytest.mark.parametrize(
    "function",
    [
        twice,
        over_a_narrower_sum,
        to_a_size_of_its_own,
        into_a_view,
        over_what_has_a_view,
        over_an_input,
        over_a_buffer,
        over_a_cast_that_is_none,
    ],
)
def test_what_is_left_to_torch(function: Callable[..., Any]) -> None:
    """A write that something else sees, a size that is nowhere in the graph."""
    program = exported(Function(function))
    whole, ours = copy.deepcopy(program).run_decompositions({}), decomposed(program)
    assert ours is not program
    assert text(ours.graph) == text(whole.graph)
    kinds = [spec.kind for spec in whole.graph_signature.output_specs]
    assert [spec.kind for spec in ours.graph_signature.output_specs] == kinds
