"""Matching rotary embedding: half, interleaved and partial forms, and nothing that looks alike."""

from collections.abc import Callable

import pytest
import torch
from modules import names, rewritten
from torch import Tensor, nn

from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.fxutil import arguments, calls, tensor
from sitsc.passes.match_rope import MatchRope

HEADS, DIM = 3, 20
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


class Rope(nn.Module):
    """`body(x, cos, sin)` of x [1, heads, tokens, DIM] and tables [1, 1, tokens, rotary]."""

    def __init__(self, body: Form) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.body(x, cos[None, None], sin[None, None])


def _run(body: Form, rotary: int = DIM) -> list:
    torch.manual_seed(1)
    inputs = (torch.randn(1, HEADS, 7, DIM), torch.randn(7, rotary), torch.randn(7, rotary))
    graph = rewritten(Rope(body), inputs, Canonicalise(), MatchRope())
    return calls(graph, "rope")


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def _half(x: Tensor) -> Tensor:
    low, high = _halves(x)
    return torch.cat((-high, low), -1)


def _chunked(x: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)


def _pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., 0::2]), -1).flatten(-2)


SAME: dict[str, tuple[Form, str, int]] = {
    "half": (lambda x, c, s: x * c + _half(x) * s, "half", DIM),
    "half of chunks": (lambda x, c, s: x * c + _chunked(x) * s, "half", DIM),
    "half, swapped operands": (lambda x, c, s: s * _half(x) + c * x, "half", DIM),
    "interleaved": (lambda x, c, s: x * c + _pairs(x) * s, "interleaved", DIM),
    "partial": (
        lambda x, c, s: torch.cat(((p := x[..., :8]) * c + _half(p) * s, x[..., 8:]), -1),
        "half",
        8,
    ),
    "partial of a split": (
        lambda x, c, s: torch.cat(((p := x.split([8, 12], -1))[0] * c + _half(p[0]) * s, p[1]), -1),
        "half",
        8,
    ),
}
DIFFERENT: dict[str, Form] = {
    "sign on the other half": lambda x, c, s: (
        x * c + torch.cat(((h := _halves(x))[1], -h[0]), -1) * s
    ),
    "no sign": lambda x, c, s: x * c + torch.cat(_halves(x)[::-1], -1) * s,
    "halves in place": lambda x, c, s: x * c + torch.cat((-(h := _halves(x))[0], h[1]), -1) * s,
    "subtracted": lambda x, c, s: x * c - _half(x) * s,
    "halves of two tensors": lambda x, c, s: (
        x * c + torch.cat((-_halves(x)[1], _halves(c * x)[0]), -1) * s
    ),
    "rotation of another tensor": lambda x, c, s: x * c + _half(x.abs()) * s,
    "odd elements first": lambda x, c, s: (
        x * c + torch.stack((-x[..., 0::2], x[..., 1::2]), -1).flatten(-2) * s
    ),
    "pairs put in halves": lambda x, c, s: x * c + torch.cat((-x[..., 1::2], x[..., 0::2]), -1) * s,
    "halves put in pairs": lambda x, c, s: (
        x * c + torch.stack((-(h := _halves(x))[1], h[0]), -1).flatten(-2) * s
    ),
    "stacked before the last": lambda x, c, s: (
        x * c + torch.stack((-(h := _halves(x))[1], h[0]), -2).flatten(-2) * s
    ),
    "table by head": lambda x, c, s: (
        (y := x.transpose(1, 2)) * c.transpose(1, 2) + _half(y) * s.transpose(1, 2)
    ),
    "weighted sum": lambda x, c, s: torch.add(x * c, _half(x) * s, alpha=2),
}


@pytest.mark.parametrize("form", SAME)
def test_every_form_is_matched(form: str):
    body, style, rotary = SAME[form]
    (rope,) = _run(body, rotary)
    args = arguments(rope)
    assert args["style"] == style
    assert args["x"].op == "placeholder"  # the whole of x, also when only a prefix turns
    assert tuple(tensor(args["cos"]).shape) == (7, rotary)


@pytest.mark.parametrize("form", DIFFERENT)
def test_look_alikes_stay(form: str):
    assert not _run(DIFFERENT[form])


def test_a_rotated_end_keeps_its_place():
    """The rest comes first: only the slice turns, and the concatenation stays."""
    (rope,) = _run(
        lambda x, c, s: torch.cat((x[..., :12], (p := x[..., 12:]) * c + _half(p) * s), -1), 8
    )
    assert arguments(rope)["x"].op != "placeholder"


def test_a_prefix_joined_with_a_wrong_rest_keeps_its_slice():
    (rope,) = _run(
        lambda x, c, s: torch.cat(((p := x[..., :8]) * c + _half(p) * s, x[..., :12]), -1), 8
    )
    assert arguments(rope)["x"].op != "placeholder"


def test_tables_are_flattened_once_for_all_layers():
    class Two(nn.Module):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            c, s = cos[None, None], sin[None, None]
            y = x * c + _half(x) * s
            return y * c + _half(y) * s

    inputs = (torch.randn(1, HEADS, 7, DIM), torch.randn(7, DIM), torch.randn(7, DIM))
    found = names(rewritten(Two(), inputs, Canonicalise(), MatchRope()))
    assert found.count("rope") == 2
    assert found.count("reshape") == 2
