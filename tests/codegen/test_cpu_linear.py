"""Linear layers on the CPU through ctypes, against plain torch, for every variant of them."""

import math

import pytest
import torch
import torch.nn.functional as F
from cpu_checks import BF16, F32, INT8, TOLERANCE, Guarded, error_of, packed, rms
from torch import Tensor

from sitsc.core.weight_formats import pack

ACTIVATIONS = [
    F.silu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.gelu,
    F.relu,
]


LINEAR_CASES = [
    # x dtype, weight dtype, tokens, n, k
    *[(x, w, t, 48, 130) for x, w in ((F32, F32), (BF16, BF16)) for t in (1, 2, 5, 17, 64)],
    *[(x, INT8, t, 33, 130) for x in (F32, BF16) for t in (1, 2, 5, 17, 64)],
    *[(x, w, 3, 1000, 576) for x in (F32, BF16) for w in (F32, BF16, INT8)],
    *[(x, w, 7, 33, 65) for x in (F32, BF16) for w in (F32, BF16, INT8)],
    *[(x, w, 130, 80, 64) for x, w in ((F32, F32), (BF16, BF16), (BF16, INT8))],
    *[(x, w, 50, 100, 4300) for x, w in ((F32, F32), (BF16, BF16), (BF16, INT8))],
    (BF16, BF16, 1, 100, 30000),
    (BF16, INT8, 1, 1, 1),
]


@pytest.mark.parametrize("epilogue", ["none", "residual", "glu"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("x_dtype", "w_dtype", "tokens", "n", "k"), LINEAR_CASES)
def test_linear(kernels, x_dtype, w_dtype, tokens, n, k, norm, epilogue):
    torch.manual_seed(tokens * n + k)
    if epilogue == "glu":
        n = -(-n // 16) * 16
    rows = 2 * n if epilogue == "glu" else n
    wide = torch.randn(tokens, k + 3).to(x_dtype)
    x = wide[:, :k]
    weight, scale, exact = packed(torch.randn(rows, k) / math.sqrt(k), w_dtype)
    bias = torch.randn(rows).to(x_dtype) if n % 2 else None
    norm_weight = torch.randn(k).to(x_dtype)
    residual = torch.randn(tokens, n).to(x_dtype)
    activation = (tokens + k) % 4
    guarded = Guarded(tokens, n, x_dtype)
    code = kernels.linear(
        x=x, x_stride=k + 3, x_dtype=x_dtype, tokens=tokens, n=n, k=k, weight=weight,
        weight_dtype=w_dtype, scale=scale, bias=bias, prologue=int(norm), norm_weight=norm_weight,
        eps=1e-5, norm_offset=1.0, epilogue=["none", "residual", "glu"].index(epilogue),
        activation=activation, residual=residual, residual_stride=n, out=guarded.out,
        out_stride=guarded.stride, out_dtype=x_dtype,
    )  # fmt: skip
    assert code == 0
    guarded.check()
    inputs = rms(x, norm_weight, 1e-5, 1.0) if norm else x.double()
    reference = inputs @ exact.T + (bias.double() if bias is not None else 0)
    if epilogue == "glu":
        reference = ACTIVATIONS[activation](reference[:, :n]) * reference[:, n:]
    elif epilogue == "residual":
        reference = reference + residual.double()
    tolerance = 1e-4 if w_dtype is INT8 and x_dtype is F32 else TOLERANCE[x_dtype]
    assert error_of(guarded.out, reference) < tolerance


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(F32, F32), (BF16, BF16), (BF16, INT8)])
def test_linear_is_batch_invariant(kernels, x_dtype, w_dtype):
    torch.manual_seed(1)
    n, k = 200, 2500
    x, norm = torch.randn(65, k).to(x_dtype), torch.randn(k).to(x_dtype)
    weight, scale, _ = packed(torch.randn(n, k), w_dtype)

    def run(rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), n)
        assert 0 == kernels.linear(
            x=rows, x_stride=k, x_dtype=x_dtype, tokens=len(rows), n=n, k=k, weight=weight,
            weight_dtype=w_dtype, scale=scale, prologue=1, norm_weight=norm, eps=1e-5, out=out,
            out_stride=n, out_dtype=F32,
        )  # fmt: skip
        return out

    together = run(x)
    for count in (1, 2, 7, 30):
        assert torch.equal(run(x[:count].clone()), together[:count])


@pytest.mark.parametrize("w_dtype", [F32, BF16, INT8])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_linear_propagates_nan(kernels, w_dtype, bad):
    x = torch.randn(3, 64)
    x[1, 5] = bad
    weight, scale, _ = packed(torch.randn(32, 64), w_dtype)
    out = torch.zeros(3, 32)
    assert 0 == kernels.linear(
        x=x, x_stride=64, x_dtype=F32, tokens=3, n=32, k=64, weight=weight, weight_dtype=w_dtype,
        scale=scale, out=out, out_stride=32, out_dtype=F32,
    )  # fmt: skip
    assert not out[1].isfinite().any()
    assert out[[0, 2]].isfinite().all()


def test_linear_errors(kernels):
    x, weight, out = torch.randn(2, 32), pack(torch.randn(16, 32), "n16"), torch.empty(2, 16)
    good = dict(x=x, x_stride=32, x_dtype=0, tokens=2, n=16, k=32, weight=weight, weight_dtype=0)
    good |= dict(out=out, out_stride=16, out_dtype=0)
    assert kernels.linear(**good) == 0
    for change, message in [
        (dict(x_dtype=2), "dtype not supported"),
        (dict(weight_dtype=3), "dtype not supported"),
        (dict(out_dtype=2), "dtype not supported"),
        (dict(k=0), "bad size"),
        (dict(tokens=-1), "bad size"),
        (dict(n=8, epilogue=2), "bad size"),
        (dict(epilogue=4), "unknown option"),
        (dict(activation=4), "unknown option"),
        (dict(prologue=2), "unknown option"),
        (dict(weight_dtype=2), "null pointer"),
        (dict(prologue=1), "null pointer"),
        (dict(epilogue=1), "null pointer"),
        (dict(out=None), "null pointer"),
    ]:
        assert kernels.error(kernels.linear(**good | change)).startswith(message)
    assert kernels.linear(**good | dict(tokens=0, x=None)) == 0
