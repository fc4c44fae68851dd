"""Matching RMS norm: every spelling that is one becomes one, and nothing else does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from modules import names, rewritten
from torch import Tensor, nn

from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.fxutil import arguments, calls
from sitsc.passes.match_rms_norm import MatchRmsNorm

HIDDEN = 20


class Norm(nn.Module):
    """`body(x, weight)` with a weight [HIDDEN]."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.weight = body, nn.Parameter(1 + 0.3 * torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.weight)


def _rms(x: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def _graph(body: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype = torch.float32) -> list:
    torch.manual_seed(0)
    x = torch.randn(3, 7, HIDDEN, dtype=dtype)
    module = Norm(body).to(dtype)
    return calls(rewritten(module, (x,), Canonicalise(), MatchRmsNorm()), "sitsc::rms_norm")


SAME = {
    "weight first": lambda x, w: w * (x * _rms(x)),
    "weight last": lambda x, w: (x * _rms(x)) * w,
    "no weight": lambda x, w: x * _rms(x) + w,
    "square by itself": lambda x, w: w * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)),
    "mean by index": lambda x, w: w * (x * torch.rsqrt(x.square().mean(2, True) + 1e-5)),
    "eps first": lambda x, w: w * (x * torch.rsqrt(1e-5 + x.pow(2).mean(-1, keepdim=True))),
    "power": lambda x, w: w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).pow(-0.5)),
    "one over root": lambda x, w: (
        w * (x * torch.reciprocal(torch.sqrt(x.pow(2).mean(-1, True) + 1e-5)))
    ),
    "of torch": lambda x, w: F.rms_norm(x, (HIDDEN,), w, 1e-5),
    "of torch without a weight": lambda x, w: w + F.rms_norm(x, (HIDDEN,), eps=1e-5),
    "one plus weight": lambda x, w: (x * _rms(x)) * (1.0 + w),
    "weight plus one": lambda x, w: (x * _rms(x)) * (w + 1.0),
}
DIFFERENT = {
    "of torch over two dimensions": lambda x, w: F.rms_norm(x, (7, HIDDEN)) + w,
    "of torch with a weight that is computed": lambda x, w: F.rms_norm(x, (HIDDEN,), w * x[0, 0]),
    "mean over another dimension": lambda x, w: (
        w * (x * torch.rsqrt(x.pow(2).mean(1, True) + 1e-5))
    ),
    "mean over two dimensions": lambda x, w: (
        w * (x * torch.rsqrt(x.pow(2).mean((1, 2), True) + 1e-5))
    ),
    "mean of all": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean() + 1e-5)),
    "eps outside of the root": lambda x, w: w * (x * (torch.rsqrt(x.pow(2).mean(-1, True)) + 1e-5)),
    "no eps": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "a sum": lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-5)),
    "a cube": lambda x, w: w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-5)),
    "another root": lambda x, w: w * (x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).pow(-0.25)),
    "of another tensor": lambda x, w: w * (x.abs() * _rms(x)),
    "scaled eps": lambda x, w: (
        w * (x * torch.rsqrt(torch.add(x.pow(2).mean(-1, True), 1, alpha=3)))
    ),
}


@pytest.mark.parametrize("form", SAME)
def test_every_form_is_matched(form: str):
    found = _graph(SAME[form])
    assert len(found) == 1
    args = arguments(found[0])
    assert args["eps"] == pytest.approx(1e-5)
    assert args["offset"] == (1.0 if "plus" in form else 0.0)
    assert (args["weight"] is None) == ("no weight" in form or "without a weight" in form)


@pytest.mark.parametrize("form", DIFFERENT)
def test_look_alikes_stay(form: str):
    assert not _graph(DIFFERENT[form])


def test_no_epsilon_of_torch_is_that_of_the_dtype():
    (norm,) = _graph(lambda x, w: F.rms_norm(x, (HIDDEN,), w))
    assert arguments(norm)["eps"] == torch.finfo(torch.float32).eps


def test_a_weight_that_does_not_start_at_one_or_nought_stays_outside():
    (norm,) = _graph(lambda x, w: (x * _rms(x)) * (2.0 + w))
    assert arguments(norm)["weight"] is None


def test_a_normed_value_with_a_second_reader_keeps_its_weight_outside():
    (norm,) = _graph(lambda x, w: (n := x * _rms(x)) * w + n)
    assert arguments(norm)["weight"] is None


def test_casts_to_float32_and_back_belong_to_the_norm():
    (norm,) = _graph(
        lambda x, w: w * (x.float() * _rms(x.float())).to(x.dtype), dtype=torch.bfloat16
    )
    assert arguments(norm)["x"].op == "placeholder"


def test_a_cast_that_loses_digits_is_not_looked_through():
    assert not _graph(lambda x, w: w * ((y := x.bfloat16().float()) * _rms(y)))


def test_a_weight_in_another_dtype_is_not_matched():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * (x.float() * _rms(x.float()))).to(x.dtype)

    x = torch.randn(2, HIDDEN, dtype=torch.bfloat16)
    assert "rms_norm" not in names(rewritten(Mixed(), (x,), Canonicalise(), MatchRmsNorm()))
