"""Matching gated activations, and what must stay apart."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from modules import rewritten
from torch import Tensor, nn

from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.fxutil import arguments, calls
from sitsc.passes.match_glu import MatchGlu

Form = Callable[[Tensor, Tensor], Tensor]


class Gate(nn.Module):
    """`body(gate, up)`."""

    def __init__(self, body: Form) -> None:
        super().__init__()
        self.body = body

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.body(gate, up)


def _run(body: Form, width: int = 9) -> list:
    torch.manual_seed(2)
    inputs = (torch.randn(2, 5, 9), torch.randn(2, 5, width))
    return calls(rewritten(Gate(body), inputs, Canonicalise(), MatchGlu()), "glu")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("silu", lambda g, u: F.silu(g) * u),
        ("silu", lambda g, u: u * F.silu(g)),
        ("silu", lambda g, u: g * torch.sigmoid(g) * u),
        ("silu", lambda g, u: u * (torch.sigmoid(g) * g)),
        ("gelu_tanh", lambda g, u: F.gelu(g, approximate="tanh") * u),
        ("gelu_erf", lambda g, u: F.gelu(g) * u),
        ("relu", lambda g, u: F.relu(g) * u),
    ],
)
def test_every_activation_is_named(kind: str, body: Form):
    (glu,) = _run(body)
    assert arguments(glu)["activation"] == kind
    assert [arguments(glu)[key].name for key in ("gate", "up")] == ["gate", "up"]


@pytest.mark.parametrize(
    "body",
    [
        lambda g, u: (a := F.silu(g)) * u + a,  # something else reads the activation
        lambda g, u: (a := F.silu(g)) * a + u,
        lambda g, u: F.silu(g) * 3.0 + u,
        lambda g, u: F.silu(g) + u,
        lambda g, u: torch.sigmoid(g) * u,
        lambda g, u: torch.tanh(g) * u,
        lambda g, u: g * torch.sigmoid(1.702 * g) * u,
        lambda g, u: g * torch.sigmoid(u) * u,
    ],
)
def test_look_alikes_stay(body: Form):
    assert not _run(body)


def test_a_broadcast_factor_stays():
    assert not _run(lambda g, u: F.silu(g) * u, width=1)
