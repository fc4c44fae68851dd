"""Matching layer norms, written by torch or by hand, and what must stay apart."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from modules import rewritten
from torch import Tensor, nn

from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.fxutil import arguments, calls
from sitsc.passes.match_layer_norm import MatchLayerNorm
from sitsc.passes.match_rms_norm import MatchRmsNorm

Form = Callable[["Norm", Tensor], Tensor]
HIDDEN, HEADS = 7, 3


class Norm(nn.Module):
    """`body(self, x)` with a weight, one over heads, and a bias."""

    def __init__(self, body: Form) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.randn(HIDDEN))
        self.over_heads = nn.Parameter(torch.randn(HEADS, HIDDEN))
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _by_hand(x: Tensor, eps: float = 1e-5) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt((x - mean).pow(2).mean(-1, keepdim=True) + eps)


def _found(body: Form) -> list:
    torch.manual_seed(1)
    passes = (Canonicalise(), MatchRmsNorm(), MatchLayerNorm(), MatchLayerNorm())
    graph = rewritten(Norm(body), (torch.randn(2, 4, HEADS, HIDDEN),), *passes)
    return [n for n in calls(graph, "layer_norm") if n.target is torch.ops.sitsc.layer_norm.default]


@pytest.mark.parametrize(
    ("weight", "bias", "body"),
    [
        ("weight", "bias", lambda m, x: F.layer_norm(x, (HIDDEN,), m.weight, m.bias)),
        ("weight", None, lambda m, x: F.layer_norm(x, (HIDDEN,), m.weight)),
        (None, None, lambda m, x: F.layer_norm(x, (HIDDEN,))),
        (None, None, lambda m, x: _by_hand(x)),
        ("weight", None, lambda m, x: m.weight * _by_hand(x)),
        ("weight", "bias", lambda m, x: _by_hand(x) * m.weight + m.bias),
        ("over_heads", None, lambda m, x: m.over_heads * _by_hand(x)),
        ("over_heads", "bias", lambda m, x: m.bias + _by_hand(x.float()) * m.over_heads),
    ],
)
def test_every_form_is_one_norm(weight: str | None, bias: str | None, body: Form):
    (norm,) = _found(body)
    a = arguments(norm)
    given = [None if a[key] is None else a[key].name for key in ("weight", "bias")]
    assert given == [name and f"p_{name}" for name in (weight, bias)]
    assert a["eps"] == 1e-5


@pytest.mark.parametrize(
    "body",
    [
        lambda m, x: F.layer_norm(x, (HEADS, HIDDEN)),  # over two dimensions
        lambda m, x: F.layer_norm(x, (HIDDEN,), x[0, 0, 0], m.bias),  # a weight that is computed
        lambda m, x: (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-5),
        lambda m, x: (x - x.mean(-1, True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    ],
)
def test_what_is_no_such_norm_stays(body: Form):
    assert not _found(body)
