"""GELU written as a formula, activations as epilogues of linear layers, and addmm as one."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from modules import names, rewritten
from torch import Tensor, nn

from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.fuse_activation import FuseActivation
from sitsc.passes.fxutil import arguments, calls
from sitsc.passes.lower_addmm import LowerAddmm
from sitsc.passes.lower_linear import LowerLinear
from sitsc.passes.match_activation import MatchActivation
from sitsc.passes.pack_weights import PackWeights

Form = Callable[[Tensor], Tensor]


class Body(nn.Module):
    """`body(x)`."""

    def __init__(self, body: Form) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Layer(nn.Module):
    """`body(linear(x))`, or addmm with a weight of [columns, rows]."""

    def __init__(self, body: Form, addmm: bool = False) -> None:
        super().__init__()
        self.body, self.addmm = body, addmm
        self.weight = nn.Parameter(torch.randn((9, 20) if addmm else (20, 9)))
        self.bias = nn.Parameter(torch.randn(20))

    def forward(self, x: Tensor) -> Tensor:
        if self.addmm:
            y = torch.addmm(self.bias, x.view(-1, 9), self.weight).view(*x.shape[:-1], 20)
        else:
            y = F.linear(x, self.weight, self.bias)
        return self.body(y)


def _tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("tanh", _tanh),
        ("tanh", lambda x: (x * (torch.tanh((x + x * x * x * 0.044715) * 0.79788456) + 1)) * 0.5),
        ("none", lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
        ("none", lambda x: 0.5 * (x * (torch.erf(x * 0.70710678) + 1))),
    ],
)
def test_formulas_of_gelu(kind: str, body: Form):
    graph = rewritten(Body(body), (torch.randn(3, 11),), Canonicalise(), MatchActivation())
    (gelu,) = calls(graph, "gelu")
    assert arguments(gelu)["approximate"] == kind
    assert len(names(graph)) == 1


@pytest.mark.parametrize(
    "body",
    [
        lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3)))),
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.05 * torch.pow(x, 3)))),
        lambda x: 0.5 * x * (2 + torch.erf(x * 0.70710678)),
        lambda x: x * (1 + torch.erf(x * 0.70710678)),
        lambda x: 0.5 * (x + 1) * (1 + torch.erf(x * 0.70710678)),
    ],
)
def test_formulas_that_only_look_like_it_stay(body: Form):
    graph = rewritten(Body(body), (torch.randn(3, 11),), Canonicalise(), MatchActivation())
    assert not calls(graph, "gelu")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("gelu_tanh", lambda y: F.gelu(y, approximate="tanh")),
        ("gelu_erf", F.gelu),
        ("silu", F.silu),
        ("relu", F.relu),
        ("relu2", lambda y: F.relu(y).pow(2)),
        ("relu2", lambda y: (z := F.relu(y)) * z),
    ],
)
@pytest.mark.parametrize("addmm", [False, True])
def test_activations_are_epilogues(kind: str, body: Form, addmm: bool):
    torch.manual_seed(3)
    passes = (Canonicalise(), LowerAddmm(), LowerLinear(), FuseActivation(), PackWeights())
    graph = rewritten(Layer(body, addmm), (torch.randn(2, 3, 9),), *passes)
    (linear,) = calls(graph, "fused_linear")
    assert (arguments(linear)["epilogue"], arguments(linear)["activation"]) == ("activation", kind)
    assert arguments(linear)["weight_format"] == "n16"
    assert not calls(graph, "addmm", "relu", "gelu", "silu", "pow")


def test_an_activation_beside_another_reader_stays():
    graph = rewritten(
        Layer(lambda y: F.silu(y) + y), (torch.randn(2, 3, 9),), LowerLinear(), FuseActivation()
    )
    assert calls(graph, "silu")
