"""Norms and embeddings on the CPU through ctypes, against plain torch, for every variant."""

import pytest
import torch
from cpu_checks import BF16, F32, INT8, TOLERANCE, Guarded, error_of, packed, rms

from sitsc.core.ops.norm import layer_norm_reference


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 576), (5, 130), (64, 576), (3, 1)])
def test_rms_norm(kernels, dtype, tokens, hidden):
    torch.manual_seed(hidden)
    x = torch.randn(tokens, hidden + 1).to(dtype)
    for weight in (None, torch.randn(hidden).to(dtype)):
        guarded = Guarded(tokens, hidden, dtype)
        code = kernels.rms_norm(
            x=x, x_stride=hidden + 1, dtype=dtype, tokens=tokens, hidden=hidden, weight=weight,
            eps=1e-6, offset=1.0, out=guarded.out, out_stride=guarded.stride,
        )  # fmt: skip
        assert code == 0
        guarded.check()
        assert error_of(guarded.out, rms(x[:, :hidden], weight, 1e-6, 1.0)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "heads", "hidden"), [(1, 1, 576), (6, 3, 130), (64, 1, 77), (4, 2, 1)]
)
def test_layer_norm(kernels, dtype, rows, heads, hidden):
    torch.manual_seed(hidden)
    x = (3 + torch.randn(rows, hidden + 1)).to(dtype)
    weight, bias = torch.randn(heads, hidden).to(dtype), torch.randn(hidden).to(dtype)
    for given in ((None, None), (weight, None), (weight, bias)):
        guarded = Guarded(rows, hidden, dtype)
        code = kernels.rms_norm(
            x=x, x_stride=hidden + 1, dtype=dtype, tokens=rows, hidden=hidden, weight=given[0],
            weight_rows=heads, bias=given[1], eps=1e-5, centred=1, out=guarded.out,
            out_stride=guarded.stride,
        )  # fmt: skip
        assert code == 0
        guarded.check()
        expected = layer_norm_reference(x[:, :hidden].view(-1, heads, hidden), *given, 1e-5)
        assert error_of(guarded.out, expected.flatten(0, 1)) < TOLERANCE[dtype]


@pytest.mark.parametrize("w_dtype", [F32, BF16, INT8])
@pytest.mark.parametrize("out_dtype", [F32, BF16])
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 576), (40, 577), (2, 7)])
def test_embedding(kernels, w_dtype, out_dtype, tokens, hidden):
    torch.manual_seed(hidden)
    weight, scale, exact = packed(torch.randn(1000, hidden), w_dtype)
    ids = torch.randint(0, 1000, (tokens,))
    ids[0] = 999
    guarded = Guarded(1, tokens * hidden, out_dtype)
    fields = dict(tokens=tokens, vocab=1000, hidden=hidden, weight=weight, weight_dtype=w_dtype)
    fields |= dict(scale=scale, out=guarded.out, out_dtype=out_dtype)
    assert kernels.embedding(ids=ids, **fields) == 0
    guarded.check()
    expected = exact.float()[ids].to(out_dtype)
    assert error_of(guarded.out.view(tokens, hidden), expected) < (
        1e-7 if out_dtype is F32 else 8e-3
    )
    for bad in (-1, 1000, 2**40):
        ids[-1] = bad
        assert kernels.error(kernels.embedding(ids=ids, **fields)) == "token id out of range"
