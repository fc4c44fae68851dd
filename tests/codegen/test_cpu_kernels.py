"""The CPU kernels through ctypes, against plain torch, for every variant that this CPU runs."""

import ctypes
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sitsc.codegen.cpu_ctypes import CpuKernels
from sitsc.codegen.cpu_kernels import ISAS, KernelSpec, compile_library, render, workspace_bytes
from sitsc.core.errors import CompileError
from sitsc.core.ops.norm import layer_norm_reference
from sitsc.core.weight_formats import format_of, pack, pad_scale, quantize_int8

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
TOLERANCE = {F32: 2e-6, BF16: 8e-3}
ACTIVATIONS = [
    F.silu,
    lambda x: F.gelu(x, approximate="tanh"),
    F.gelu,
    F.relu,
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> CpuKernels:
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    compile_library(render(KernelSpec()), path)
    return CpuKernels(path)


@pytest.fixture(params=[isa.name for isa in ISAS])
def kernels(library: CpuKernels, request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    if not library.select_isa(request.param):
        pytest.skip(f"this CPU does not run {request.param}")
    assert library.isa() == request.param
    yield library
    library.library.sitsc_cpu_set_workspace(None, 0)
    library.select_isa(None)


def error_of(ours: Tensor, reference: Tensor) -> float:
    """max|a-b| / max|b|."""
    difference = (ours.double() - reference.double()).abs().max()
    return float(difference / reference.double().abs().max().clamp_min(1e-30))


class Guarded:
    """An output [rows, cols] of NaN inside a larger buffer, to see writes outside it."""

    def __init__(self, rows: int, cols: int, dtype: torch.dtype, gap: int = 5) -> None:
        self.stride = cols + gap
        self.buffer = torch.full(((rows + 2) * self.stride,), math.nan, dtype=dtype)
        self.out = self.buffer[self.stride :].as_strided(
            (rows, cols), (self.stride, 1), self.stride
        )

    def check(self) -> None:
        inside = self.out.clone()
        assert not inside.isnan().any()
        self.out.fill_(math.nan)
        assert self.buffer.isnan().all()
        self.out.copy_(inside)


def rms(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    x = x.double()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * (weight.double() + offset)


def packed(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor]:
    """Packed weight, padded scale or None, and the float64 weight it stands for."""
    if dtype is INT8:
        values, scale = quantize_int8(weight)
        return pack(values, "n16k2"), pad_scale(scale), values.double() * scale.double()[:, None]
    weight = weight.to(dtype)
    return pack(weight, format_of(dtype)), None, weight.double()


LINEAR_CASES = [
    # x dtype, weight dtype, tokens, n, k
    *[(x, w, t, 48, 130) for x, w in ((F32, F32), (BF16, BF16)) for t in (1, 2, 5, 17, 64)],
    *[(x, INT8, t, 33, 130) for x in (F32, BF16) for t in (1, 2, 5, 17, 64)],
    *[(x, w, 3, 1000, 576) for x in (F32, BF16) for w in (F32, BF16, INT8)],
    *[(x, w, 7, 33, 65) for x in (F32, BF16) for w in (F32, BF16, INT8)],
    *[(x, w, 130, 80, 64) for x, w in ((F32, F32), (BF16, BF16), (BF16, INT8))],
    *[(x, w, 50, 100, 4300) for x, w in ((F32, F32), (BF16, BF16), (BF16, INT8))],
    (BF16, BF16, 1, 1000, 30000),
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


@dataclasses.dataclass
class Attention:
    """A random batch: sequence i has context[i] cached tokens and new[i] new ones."""

    new: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (0,)
    heads: tuple[int, int] = (9, 3)
    dim: int = 64
    v_dim: int = 0
    dtype: torch.dtype = F32
    kv_dtype: torch.dtype | None = None
    rope: int = 1
    rotary: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    poison: bool = True

    def build(self) -> None:
        torch.manual_seed(sum(self.new) + sum(self.context) + self.dim)
        self.v_dim = self.v_dim or self.dim
        self.rotary = self.rotary or self.dim
        self.kv_dtype = self.kv_dtype or self.dtype
        q_heads, kv_heads = self.heads
        tokens = sum(self.new)
        self.qkv = torch.randn(
            tokens, q_heads * self.dim + kv_heads * (self.dim + self.v_dim) + 3
        ).to(self.dtype)
        cut = [q_heads * self.dim, kv_heads * self.dim, kv_heads * self.v_dim, 3]
        q, k, v, _ = self.qkv.split(cut, dim=1)
        self.q, self.k = q.unflatten(1, (q_heads, -1)), k.unflatten(1, (kv_heads, -1))
        self.v = v.unflatten(1, (kv_heads, -1))
        angles = torch.rand(tokens, self.rotary // 2) * 6
        angles = angles.repeat(1, 2) if self.rope == 1 else angles.repeat_interleave(2, dim=1)
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.sink = torch.randn(q_heads) if self.sinks else None
        pages = [-(-(c + n) // 16) for c, n in zip(self.context, self.new, strict=True)]
        self.num_pages = sum(pages) + 3
        self.k_size, self.v_size = kv_heads * self.dim * 16, kv_heads * self.v_dim * 16
        stride = max(self.k_size, self.v_size) + 8
        self.page_stride = stride
        self.k_cache = torch.full((self.num_pages, stride), math.nan).to(self.kv_dtype)
        self.v_cache = self.k_cache.clone()
        order = torch.randperm(self.num_pages).tolist()
        width = max(pages, default=0) + 2
        self.table = torch.full((len(pages), width), -7, dtype=torch.int32)
        self.past = []
        for s, count in enumerate(pages):
            self.table[s, :count] = torch.tensor([order.pop() for _ in range(count)])
            past_k = torch.randn(self.context[s], kv_heads, self.dim).to(self.kv_dtype)
            past_v = torch.randn(self.context[s], kv_heads, self.v_dim).to(self.kv_dtype)
            self.past.append((past_k, past_v))
            for t in range(self.context[s]):
                self.key_slot(s, t).copy_(past_k[t])
                self.value_slot(s, t).copy_(past_v[t])
        self.start = torch.tensor([0, *self.new]).cumsum(0).to(torch.int32)
        self.lengths = torch.tensor(self.context, dtype=torch.int32)

    def key_slot(self, seq: int, position: int) -> Tensor:
        page = self.k_cache[int(self.table[seq, position // 16]), : self.k_size]
        return page.view(self.heads[1], self.dim, 16)[:, :, position % 16]

    def value_slot(self, seq: int, position: int) -> Tensor:
        page = self.v_cache[int(self.table[seq, position // 16]), : self.v_size]
        return page.view(self.heads[1], 16, self.v_dim)[:, position % 16]

    def fields(self, out: Guarded) -> dict:
        q_heads, kv_heads = self.heads
        stride = self.qkv.shape[1]
        return dict(
            q=self.q, k=self.k, v=self.v, q_stride_token=stride, q_stride_head=self.dim,
            k_stride_token=stride, k_stride_head=self.dim, v_stride_token=stride,
            v_stride_head=self.v_dim, dtype=self.dtype, cos=self.cos if self.rope else None,
            sin=self.sin if self.rope else None, cos_stride=self.rotary, rotary_dim=self.rotary,
            rope_style=self.rope, k_cache=self.k_cache, v_cache=self.v_cache,
            kv_dtype=self.kv_dtype, page_tokens=16, page_stride=self.page_stride,
            num_pages=self.num_pages, block_table=self.table,
            block_table_stride=self.table.shape[1], query_start=self.start,
            context_len=self.lengths, seqs=len(self.new), tokens=sum(self.new), q_heads=q_heads,
            kv_heads=kv_heads, head_dim=self.dim, v_head_dim=self.v_dim,
            scale=1 / math.sqrt(self.dim), softcap=self.softcap, window=self.window,
            sinks=self.sink, out=out.out, out_stride=out.stride,
        )  # fmt: skip

    def rotated(self, x: Tensor) -> Tensor:
        if not self.rope:
            return x.double()
        x, rest = x.double().split([self.rotary, x.shape[-1] - self.rotary], dim=-1)
        cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]
        if self.rope == 1:
            low, high = x.chunk(2, dim=-1)
            other = torch.cat([-high, low], dim=-1)
        else:
            other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return torch.cat([x * cos + other * sin, rest], dim=-1)

    def reference(self) -> tuple[Tensor, list[Tensor]]:
        """The output [tokens, q_heads * v_dim] in float64, and all keys of each sequence."""
        group = self.heads[0] // self.heads[1]
        outs, all_keys = [], []
        q, k = self.rotated(self.q), self.rotated(self.k).to(self.kv_dtype)
        for s, (past_k, past_v) in enumerate(self.past):
            rows = slice(int(self.start[s]), int(self.start[s + 1]))
            keys = torch.cat([past_k, k[rows]]).double()
            values = torch.cat([past_v, self.v[rows].to(self.kv_dtype)]).double()
            all_keys.append(keys)
            score = torch.einsum("qhd,khd->hqk", q[rows], keys.repeat_interleave(group, 1))
            score = score / math.sqrt(self.dim)
            if self.softcap:
                score = self.softcap * torch.tanh(score / self.softcap)
            i = torch.arange(self.new[s])[:, None] + self.context[s]
            j = torch.arange(len(keys))
            seen = j <= i
            if self.window:
                seen &= j > i - self.window
            score = score.masked_fill(~seen, -math.inf)
            if self.sink is not None:
                sink = self.sink.double()[:, None, None].expand(-1, score.shape[1], 1)
                score = torch.cat([score, sink], dim=2)
            weight = score.softmax(-1)[..., : len(keys)]
            out = torch.einsum("hqk,khd->qhd", weight, values.repeat_interleave(group, 1))
            outs.append(out.flatten(1))
        return torch.cat(outs), all_keys


ATTENTION_CASES = {
    "first": Attention(),
    "decode": Attention(context=(100,)),
    "decode_bf16": Attention(context=(100,), dtype=BF16),
    "decode_long": Attention(context=(1000,), dtype=BF16),
    "batch_decode": Attention(new=(1, 1, 1, 1), context=(0, 5, 16, 100)),
    "page_edges": Attention(new=(1, 1, 2, 16, 17), context=(15, 16, 15, 16, 31), dtype=BF16),
    "chunk_edges": Attention(new=(1, 1, 2, 65), context=(63, 64, 63, 127)),
    "ragged": Attention(new=(5, 0, 17, 1, 64), context=(0, 5, 16, 100, 3)),
    "ragged_bf16": Attention(new=(5, 0, 17, 1, 64), context=(0, 5, 16, 100, 3), dtype=BF16),
    "many": Attention(new=(1,) * 20, context=tuple(range(0, 200, 10)), dtype=BF16),
    "prefill": Attention(new=(150,), dtype=BF16),
    "mha": Attention(new=(3, 40), context=(5, 100), heads=(4, 4), dim=16),
    "mqa": Attention(new=(3, 40), context=(5, 100), heads=(8, 1), dim=128, dtype=BF16),
    "wide_group": Attention(new=(3, 2), context=(5, 100), heads=(100, 1), dim=16),
    "dim80": Attention(new=(2, 40), context=(5, 100), heads=(4, 4), dim=80, dtype=BF16),
    "odd_dims": Attention(new=(2, 40), context=(5, 100), heads=(4, 2), dim=72, v_dim=24),
    "odd_dims_bf16": Attention(
        new=(1, 9), context=(5, 70), heads=(4, 2), dim=36, v_dim=20, dtype=BF16
    ),
    "no_rope": Attention(new=(2, 40), context=(5, 100), rope=0),
    "interleaved": Attention(new=(2, 40), context=(5, 100), rope=2),
    "partial_rope": Attention(new=(2, 40), context=(5, 100), rope=1, rotary=16),
    "partial_interleaved": Attention(new=(2, 40), context=(5, 100), rope=2, rotary=12),
    "window": Attention(new=(1, 3, 70), context=(100, 30, 100), window=20),
    "window_bf16": Attention(new=(1, 3, 90), context=(100, 30, 7), window=33, dtype=BF16),
    "window_one": Attention(new=(1, 5), context=(64, 62), window=1),
    "softcap": Attention(new=(1, 30), context=(100, 3), softcap=5.0),
    "sinks": Attention(new=(1, 30), context=(100, 0), sinks=True),
    "everything": Attention(
        new=(1, 30), context=(100, 9), sinks=True, softcap=20.0, window=40, dtype=BF16, rope=2
    ),
    "bf16_cache": Attention(new=(1, 30), context=(100, 9), kv_dtype=BF16),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention(kernels, name):
    case = dataclasses.replace(ATTENTION_CASES[name])
    case.build()
    reference, all_keys = case.reference()
    before_k, before_v = case.k_cache.clone(), case.v_cache.clone()
    guarded = Guarded(sum(case.new), case.heads[0] * case.v_dim, case.dtype)
    if case.window:  # pages before every window may be gone
        for s, context in enumerate(case.context):
            case.table[s, : max(0, context - case.window + 1) // 16] = -1
    assert kernels.error(kernels.attention(**case.fields(guarded))) == "fine"
    guarded.check()
    assert error_of(guarded.out, reference) < (TOLERANCE[BF16] if case.dtype is BF16 else 3e-6)
    key_tolerance = TOLERANCE[case.kv_dtype or case.dtype]
    # The new keys and values are where they belong, and nothing else was touched.
    for s, count in enumerate(case.new):
        for t in range(count):
            position = case.context[s] + t
            expected = all_keys[s][position]
            assert error_of(case.key_slot(s, position), expected) < key_tolerance
            assert torch.equal(
                case.value_slot(s, position), case.v[int(case.start[s]) + t].to(case.kv_dtype)
            )
            case.key_slot(s, position).fill_(math.nan)
            case.value_slot(s, position).fill_(math.nan)
    assert torch.equal(case.k_cache.nan_to_num(7.5), before_k.nan_to_num(7.5))
    assert torch.equal(case.v_cache.nan_to_num(7.5), before_v.nan_to_num(7.5))


def test_attention_is_batch_invariant(kernels):
    """The last token alone, after the others are cached, gives the bits of the whole prefill."""
    whole = Attention(new=(300,), dtype=BF16)
    whole.build()
    out = Guarded(300, 9 * 64, BF16)
    fields = whole.fields(out)
    assert kernels.attention(**fields) == 0
    for first, count in ((299, 1), (290, 5), (200, 100)):
        part = Guarded(count, 9 * 64, BF16)
        rows = slice(first, first + count)
        fields |= dict(
            q=whole.q[rows], k=whole.k[rows], v=whole.v[rows], cos=whole.cos[rows],
            sin=whole.sin[rows], tokens=count, out=part.out, out_stride=part.stride,
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_len=torch.tensor([first], dtype=torch.int32),
        )  # fmt: skip
        assert kernels.attention(**fields) == 0
        assert torch.equal(part.out, out.out[rows])


def test_attention_errors(kernels):
    case = Attention(new=(2, 3), context=(5, 20))
    case.build()
    guarded = Guarded(5, 9 * 64, F32)
    good = case.fields(guarded)
    before = case.k_cache.clone()
    for page in (-1, case.num_pages):
        table = case.table.clone()
        table[1, 1] = page
        code = kernels.attention(**good | dict(block_table=table))
        assert kernels.error(code) == "KV page out of range"
    for change, message in [
        (dict(block_table_stride=1), "KV page out of range"),
        (dict(query_start=torch.tensor([0, 4, 3], dtype=torch.int32)), "query_start or"),
        (dict(query_start=torch.tensor([0, 6, 5], dtype=torch.int32)), "query_start or"),
        (dict(context_len=torch.tensor([-1, 0], dtype=torch.int32)), "query_start or"),
        (dict(page_tokens=32), "bad size"),
        (dict(kv_heads=2), "bad size"),
        (dict(rotary_dim=66), "bad size"),
        (dict(kv_dtype=INT8), "dtype not supported"),
        (dict(rope_style=3), "unknown option"),
        (dict(k_cache=None), "null pointer"),
        (dict(sin=None), "null pointer"),
    ]:
        assert kernels.error(kernels.attention(**good | change)).startswith(message)
    assert guarded.buffer.isnan().all()
    assert torch.equal(case.k_cache.nan_to_num(7.5), before.nan_to_num(7.5))
    assert kernels.attention(**good | dict(tokens=0, seqs=0)) == 0


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


def test_workspace(kernels):
    spec = KernelSpec()
    sizes = [(1, 1, 1, 1, 1, 1, 1), (512, 1536, 49152, 1, 9, 64, 8192), (7, 8000, 9, 7, 32, 80, 99)]
    names = ("tokens", "max_k", "max_n", "seqs", "q_heads", "head_dim", "max_context")
    for size in sizes:
        ours = workspace_bytes(spec, **dict(zip(names, size, strict=True)))
        assert kernels.library.sitsc_cpu_workspace_bytes(*size) == ours
    tokens, n, k = 200, 64, 500
    x, norm, out = torch.randn(tokens, k), torch.randn(k), torch.empty(tokens, n)
    weight, scale, _ = packed(torch.randn(n, k), INT8)
    fields = dict(x=x, x_stride=k, x_dtype=0, tokens=tokens, n=n, k=k, weight=weight, scale=scale)
    fields |= dict(weight_dtype=2, prologue=1, norm_weight=norm, eps=1e-5, out=out, out_stride=n)
    size = workspace_bytes(
        spec, tokens=tokens, max_k=k, max_n=n, seqs=1, q_heads=1, head_dim=1, max_context=1
    )
    space = torch.zeros(size + 64, dtype=INT8)
    offset = 3  # not aligned, on purpose
    pointer = ctypes.c_void_p(space.data_ptr() + offset)
    assert kernels.library.sitsc_cpu_set_workspace(pointer, size) == 0
    assert kernels.linear(**fields) == 0
    assert not space[size + offset :].any() and not space[:offset].any()
    expected = out.clone()
    assert kernels.library.sitsc_cpu_set_workspace(pointer, 1000) == 0
    assert kernels.error(kernels.linear(**fields)) == "workspace too small"
    assert kernels.library.sitsc_cpu_set_workspace(None, 0) == 0
    assert kernels.linear(**fields) == 0
    assert torch.equal(out, expected)


def test_one_thread_gives_the_same_bits(kernels):
    torch.manual_seed(0)
    case = Attention(new=(1,), context=(700,), dtype=BF16)
    outs = []
    threads = torch.get_num_threads()
    for count in (threads, 1):
        torch.set_num_threads(count)
        case.build()
        guarded = Guarded(1, 9 * 64, BF16)
        assert kernels.attention(**case.fields(guarded)) == 0
        outs.append(guarded.out.clone())
    torch.set_num_threads(threads)
    assert torch.equal(*outs)


def test_isa_names(library):
    assert not library.select_isa("z80")
    assert library.select_isa(None)
    assert library.error(99) == "unknown error code"


def test_render_is_deterministic():
    assert render(KernelSpec()) == render(KernelSpec())
    assert render(KernelSpec(row_tile=5)) != render(KernelSpec())


def test_compile_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CompileError, match="error"):
        compile_library({"a.cpp": "int f( {"}, tmp_path / "a.so")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompileError, match="no-such-compiler"):
        compile_library({"a.cpp": "int f() { return 1; }"}, tmp_path / "a.so")
    assert list(tmp_path.iterdir()) == []


def test_compile_gives_the_same_bytes(tmp_path: Path):
    sources = {"a.cpp": "namespace { int g = 3; } int f() { return g; }"}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        compile_library(sources, tmp_path / name / "lib.so")
    assert (tmp_path / "one/lib.so").read_bytes() == (tmp_path / "two/lib.so").read_bytes()
