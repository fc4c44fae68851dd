"""Fusing linear layers with what surrounds them: when it happens, and when it must not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import rewritten
from torch import Tensor, nn

from sitsc.passes import FUSED
from sitsc.passes.fxutil import arguments, calls, weight_of

HIDDEN = 24
Body = Callable[[Any, Tensor], Tensor]


class Block(nn.Module):
    """`body(self.layers[0], x)`, so that module paths name a layer."""

    class Layer(nn.Module):
        def __init__(self, body: Body, layers: dict[str, tuple[int, int, bool]]) -> None:
            super().__init__()
            self.body, self.w = body, nn.Parameter(1 + 0.2 * torch.randn(HIDDEN))
            for name, (rows, columns, bias) in layers.items():
                self.add_module(name, nn.Linear(columns, rows, bias=bias))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self, x)

        def norm(self, x: Tensor) -> Tensor:
            return self.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def __init__(self, body: Body, layers: dict[str, tuple[int, int, bool]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(body, layers)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def _fused(body: Body, **layers: tuple[int, int, bool]) -> list[dict[str, Any]]:
    """Arguments of every fused_linear after all passes; results are compared with the module's."""
    torch.manual_seed(3)
    graph = rewritten(Block(body, layers), (torch.randn(1, 5, HIDDEN),), *FUSED, dims=None)
    return [arguments(node) for node in calls(graph, "fused_linear")]


def _kinds(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(args["prologue"], args["epilogue"]) for args in found]


def test_gate_and_up_become_one_layer():
    (fused,) = _fused(
        lambda m, x: F.silu(m.gate(x)) * m.up(x), gate=(32, HIDDEN, False), up=(32, HIDDEN, False)
    )
    assert (fused["epilogue"], fused["activation"], fused["out_features"]) == ("glu", "silu", 32)
    spec = weight_of(fused["weight"])
    assert spec is not None
    assert spec.name == "layers.0.gate+up.weight"
    assert [source.tensor for source in spec.sources] == [
        "layers.0.gate.weight",
        "layers.0.up.weight",
    ]


def test_the_halves_of_one_layer_become_its_epilogue():
    def body(m: Any, x: Tensor) -> Tensor:
        gate, up = m.both(x).chunk(2, -1)
        return F.silu(gate) * up

    (fused,) = _fused(body, both=(64, HIDDEN, False))
    assert (fused["epilogue"], fused["out_features"]) == ("glu", 32)


def test_swapped_halves_stay():
    def body(m: Any, x: Tensor) -> Tensor:
        up, gate = m.both(x).chunk(2, -1)
        return F.silu(gate) * up

    assert _kinds(_fused(body, both=(64, HIDDEN, False))) == [("none", "none")]


def test_halves_that_something_else_reads_stay():
    def body(m: Any, x: Tensor) -> Tensor:
        both = m.both(x)
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up + both[..., :32]

    assert _kinds(_fused(body, both=(64, HIDDEN, False))) == [("none", "none")]


@pytest.mark.parametrize(
    ("body", "gate", "up"),
    [
        (lambda m, x: F.silu(m.gate(x)) * m.up(x), (50, HIDDEN, False), (50, HIDDEN, False)),
        (lambda m, x: F.silu(m.gate(x)) * m.up(x), (32, HIDDEN, True), (32, HIDDEN, False)),
        (lambda m, x: F.silu(m.gate(x)) * m.up(x), (32, HIDDEN, False), (32, HIDDEN, True)),
        (lambda m, x: F.silu(m.gate(x)) * m.up(2 * x), (32, HIDDEN, False), (32, HIDDEN, False)),
        (lambda m, x: F.silu(m.gate(x)) * m.gate(x), (32, HIDDEN, False), (32, HIDDEN, False)),
        (
            lambda m, x: F.silu(m.gate(x)) * (u := m.up(x)) + u,
            (32, HIDDEN, False),
            (32, HIDDEN, False),
        ),
        (
            lambda m, x: (g := m.gate(x)) + F.silu(g) * m.up(x),
            (32, HIDDEN, False),
            (32, HIDDEN, False),
        ),
    ],
)
def test_gates_that_do_not_fit_stay(
    body: Body, gate: tuple[int, int, bool], up: tuple[int, int, bool]
):
    assert all(kind != "glu" for _, kind in _kinds(_fused(body, gate=gate, up=up)))


def test_layers_of_one_input_are_merged_with_their_biases():
    (merged,) = _fused(
        lambda m, x: torch.cat((m.q(x).tanh(), m.k(x), m.v(x)), -1),
        q=(32, HIDDEN, True),
        k=(5, HIDDEN, True),
        v=(3, HIDDEN, True),
    )
    assert merged["out_features"] == 40
    weight, bias = weight_of(merged["weight"]), weight_of(merged["bias"])
    assert weight is not None and bias is not None
    assert (weight.name, weight.shape) == ("layers.0.q+k+v.weight", (40, HIDDEN))
    assert (bias.name, bias.shape) == ("layers.0.q+k+v.bias", (40,))


def test_layers_with_and_without_bias_are_not_merged():
    found = _fused(lambda m, x: m.q(x) + 2 * m.k(x), q=(8, HIDDEN, True), k=(8, HIDDEN, False))
    assert [args["out_features"] for args in found] == [8, 8]


def test_a_norm_goes_into_both_of_its_readers_and_a_sum_into_the_last():
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return m.b(m.a(y)) + x + m.c(y.tanh())

    found = _fused(body, a=(7, HIDDEN, False), b=(HIDDEN, 7, False), c=(HIDDEN, HIDDEN, False))
    assert ("rms_norm", "none") not in _kinds(found)  # tanh reads the norm too
    found = _fused(lambda m, x: m.b(m.a(m.norm(x))) + x, a=(7, HIDDEN, True), b=(HIDDEN, 7, True))
    assert _kinds(found) == [("rms_norm", "none"), ("none", "residual")]


def test_a_norm_with_many_readers_is_computed_once():
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return m.a(y) + m.b(y.tanh()) + m.c(y.relu())

    size = (HIDDEN, HIDDEN, False)
    assert "rms_norm" not in [kind for kind, _ in _kinds(_fused(body, a=size, b=size, c=size))]


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: (y := m.a(x)) + x + y.tanh(),  # the layer's output is read twice
        lambda m, x: torch.add(m.a(x), x, alpha=2),
        lambda m, x: m.a(x) + x[:, :1],  # broadcast over tokens
        lambda m, x: m.a(x) + 1.0,
        lambda m, x: m.a(x) - x,
        lambda m, x: (y := m.a(x)) + y,
    ],
)
def test_sums_that_do_not_fit_stay(body: Body):
    found = _fused(body, a=(HIDDEN, HIDDEN, False))
    assert _kinds(found) == [("none", "none")]


def test_a_sum_of_two_layers_takes_one_into_the_other():
    found = _fused(
        lambda m, x: m.a(x) + m.b(x.tanh()), a=(HIDDEN, HIDDEN, False), b=(HIDDEN, HIDDEN, False)
    )
    assert sorted(_kinds(found)) == [("none", "none"), ("none", "residual")]
