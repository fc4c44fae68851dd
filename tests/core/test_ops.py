"""Operators: fake implementations agree with real ones, references with plain formulas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core import weight_formats
from sitsc.core.ops.attention import attend
from sitsc.core.ops.norm import ACTIVATIONS
from sitsc.core.ops.rope import rope_reference

ops: Any = torch.ops.sitsc
PAGE = 4


def _rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _linear(epilogue: str = "none", **changes: Any) -> tuple[Any, ...]:
    """Arguments of fused_linear: x [1, 3, 20] to 9 (GLU: 16) features."""
    size = 16 if epilogue == "glu" else 9
    weight = _rand(size * (2 if epilogue == "glu" else 1), 20, seed=1)
    values: dict[str, Any] = {
        "x": _rand(1, 3, 20),
        "weight": weight,
        "scale": None,
        "bias": None,
        "norm_weight": None,
        "residual": _rand(1, 3, size, seed=2) if epilogue == "residual" else None,
        "out_features": size,
        "prologue": "none",
        "eps": 1e-5,
        "offset": 0.0,
        "epilogue": epilogue,
        "activation": "silu",
        "out_dtype": "float32",
        "weight_format": "plain",
    } | changes
    return tuple(values.values())


def _paged(style: str = "half", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    q, k = _rand(7, 4, 8, dtype=dtype), _rand(7, 2, 8, dtype=dtype, seed=1)
    table = None if style == "none" else _rand(7, 6, dtype=dtype, seed=2)
    kv = torch.zeros(9, 3, 2, 2, 8 * PAGE, dtype=dtype)
    batch = [
        torch.tensor(values, dtype=torch.int32) for values in ([[4, 2], [7, 8]], [0, 5, 7], [0, 3])
    ]
    return (q, k, k * 2, table, table, None, kv, *batch, 1, PAGE, 0.3, 0, 0.0, style)


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rms_norm": (ops.rms_norm.default, (_rand(2, 3, 5), _rand(5), 1e-5, 0.0)),
    "rms_norm of a view": (ops.rms_norm.default, (_rand(2, 3, 10)[..., :5], None, 1e-5, 1.0)),
    "rms_norm bfloat16": (
        ops.rms_norm.default,
        (_rand(3, 5, dtype=torch.bfloat16), _rand(5, dtype=torch.bfloat16), 1e-5, 1.0),
    ),
    "layer_norm": (ops.layer_norm.default, (_rand(2, 3, 5), _rand(3, 5), _rand(5), 1e-5)),
    "layer_norm bfloat16": (
        ops.layer_norm.default,
        (_rand(3, 10, dtype=torch.bfloat16)[:, :5], None, None, 1e-5),
    ),
    "glu": (ops.glu.default, (_rand(2, 3, 7), _rand(2, 3, 14)[..., :7], "gelu_tanh")),
    "rope": (ops.rope.default, (_rand(1, 3, 5, 8), _rand(5, 8), _rand(5, 8), "half")),
    "partial rope of a view": (
        ops.rope.default,
        (_rand(1, 5, 3, 8).transpose(1, 2), _rand(5, 4), _rand(5, 4), "interleaved"),
    ),
    "rope_table": (
        ops.rope_table.default,
        (torch.tensor([5, 0, 7]), _rand(3), 1.5, "bfloat16"),
    ),
    "keep": (ops.keep.default, (_rand(3, 4).T,)),
    "attention": (
        ops.attention.default,
        (_rand(1, 4, 5, 8), _rand(1, 2, 5, 8), _rand(1, 2, 5, 6), _rand(4), 3, 0.3, 2, 5.0),
    ),
    "paged_attention": (ops.paged_attention.default, _paged()),
    "paged_attention bfloat16": (ops.paged_attention.default, _paged("none", torch.bfloat16)),
    "packed_embedding": (
        ops.packed_embedding.default,
        (torch.tensor([[1, 2, 0]]), _rand(5, 6), None, 5, 6, "bfloat16", "plain"),
    ),
    "packed_embedding of blocks": (
        ops.packed_embedding.default,
        (
            torch.tensor([1, 36]),
            weight_formats.pack(_rand(37, 6), "n16"),
            None,
            37,
            6,
            "float32",
            "n16",
        ),
    ),
    "fused_linear": (ops.fused_linear.default, _linear()),
    "fused_linear residual": (ops.fused_linear.default, _linear("residual")),
    "fused_linear activation": (
        ops.fused_linear.default,
        _linear("activation", activation="relu2"),
    ),
    "fused_linear glu": (ops.fused_linear.default, _linear("glu", out_dtype="bfloat16")),
}


@pytest.mark.parametrize("name", CALLS)
def test_fake_and_real_agree(name: str):
    """Shape, strides and dtype of the fake result, and what operator checks of torch ask for."""
    op, args = CALLS[name]
    real = op(*args)
    with FakeTensorMode() as mode:
        made = op(*[mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args])
    assert (made.shape, made.dtype, made.stride()) == (real.shape, real.dtype, real.stride())
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(op, args, test_utils=tests)


def test_paged_attention_says_that_it_writes_the_pool():
    args = _paged()
    before = args[6].clone()
    ops.paged_attention(*args)
    changed = (args[6] != before).flatten(3).any(-1)
    assert changed[:, 1].any()
    assert not changed[:, 0].any() and not changed[:, 2].any()  # other layers


# --- references ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_is_that_of_torch(offset: float):
    x, weight = _rand(4, 33), _rand(33, seed=1)
    wanted = F.rms_norm(x, (33,), weight + offset, 1e-6)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6, offset), wanted)
    torch.testing.assert_close(ops.rms_norm(x, None, 1e-6, offset), F.rms_norm(x, (33,), eps=1e-6))


@pytest.mark.parametrize("prologue", ["none", "rms_norm"])
@pytest.mark.parametrize("epilogue", ["none", "residual", "glu"])
def test_fused_linear_is_its_parts(prologue: str, epilogue: str):
    bias, norm = _rand(32 if epilogue == "glu" else 9, seed=5), _rand(20, seed=6)
    args = _linear(epilogue, prologue=prologue, norm_weight=norm, bias=bias, activation="gelu_erf")
    x, weight, residual = args[0], args[1], args[5]
    y = F.rms_norm(x, (20,), norm, 1e-5) if prologue == "rms_norm" else x
    y = F.linear(y, weight, bias)
    if epilogue == "residual":
        y = y + residual
    if epilogue == "glu":
        y = F.gelu(y[..., :16]) * y[..., 16:]
    torch.testing.assert_close(ops.fused_linear(*args), y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_packed_weight_computes_what_the_plain_one_does(dtype: torch.dtype):
    weight, scale = _rand(37, 20, seed=1), None
    stored = weight.to(dtype) if dtype.is_floating_point else weight
    if dtype == torch.int8:
        stored, scale = weight_formats.quantize_int8(weight)
    kind = weight_formats.format_of(dtype)
    packed = weight_formats.pack(stored, kind)
    padded = None if scale is None else weight_formats.pad_scale(scale)
    given = {"weight": packed, "scale": padded, "out_features": 37, "weight_format": kind}
    out = ops.fused_linear(*_linear(**given))
    plain = stored.float() * (1 if scale is None else scale[:, None])
    torch.testing.assert_close(out, F.linear(_rand(1, 3, 20), plain))
    rows = torch.tensor([36, 0, 5])
    table = ops.packed_embedding(rows, packed, padded, 37, 20, "float32", kind)
    torch.testing.assert_close(table, plain[rows])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_glu_is_activation_times_up(name: str):
    gate, up = _rand(3, 5), _rand(3, 5, seed=1)
    wanted = {
        "silu": gate * torch.sigmoid(gate),
        "gelu_tanh": F.gelu(gate, approximate="tanh"),
        "gelu_erf": F.gelu(gate),
        "relu": gate.clamp_min(0),
        "relu2": gate.clamp_min(0) ** 2,
    }
    torch.testing.assert_close(ops.glu(gate, up, name), wanted[name] * up)


@given(st.sampled_from(["half", "interleaved"]), st.integers(1, 4), st.integers(0, 3))
@settings(deadline=None)
def test_rope_turns_pairs_as_complex_numbers(style: str, pairs: int, rest: int):
    x = _rand(3, 2, 2 * pairs + rest)
    angles = _rand(3, 1, pairs, seed=1)
    wide = torch.cat((angles, angles), -1) if style == "half" else angles.repeat_interleave(2, -1)
    out = rope_reference(x, wide.cos(), wide.sin(), style)
    index = (
        torch.arange(2 * pairs).view(2, -1)
        if style == "half"
        else torch.arange(2 * pairs).view(-1, 2).T
    )
    turned = torch.complex(x[..., index[0]], x[..., index[1]]) * torch.polar(
        torch.ones_like(angles), angles
    )
    torch.testing.assert_close(out[..., index[0]], turned.real)
    torch.testing.assert_close(out[..., index[1]], turned.imag)
    assert torch.equal(out[..., 2 * pairs :], x[..., 2 * pairs :])


@given(st.integers(1, 9), st.integers(0, 5), st.sampled_from([0, 1, 3, 50]), st.booleans())
@settings(deadline=None)
def test_attend_is_attention_of_torch(new: int, first: int, window: int, grouped: bool):
    q = _rand(4, new, 8)
    k, v = (
        _rand(2 if grouped else 4, first + new, 8, seed=1),
        _rand(2 if grouped else 4, first + new, 6, seed=2),
    )
    i, j = torch.arange(first, first + new)[:, None], torch.arange(first + new)[None]
    mask = (j <= i) & ((j > i - window) if window else torch.tensor(True))
    wanted = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=grouped)
    out = attend(q, k, v, first, 0.3, window, 0.0, None)
    torch.testing.assert_close(out, wanted.transpose(0, 1))


def test_softcap_and_sinks_by_their_formulas():
    q, k, v, sinks = (
        _rand(2, 3, 4),
        _rand(2, 3, 4, seed=1),
        _rand(2, 3, 4, seed=2),
        _rand(2, seed=3),
    )
    out = attend(q, k, v, 0, 0.5, 0, 2.0, sinks)
    for head in range(2):
        for i in range(3):
            scores = [2.0 * torch.tanh(0.5 * (q[head, i] @ k[head, j]) / 2.0) for j in range(i + 1)]
            weights = torch.stack(scores).exp()
            total = weights.sum() + sinks[head].exp()  # a sink takes its share and gives nothing
            wanted = (weights[:, None] * v[head, : i + 1]).sum(0) / total
            torch.testing.assert_close(out[i, head], wanted)


# --- paged attention against one sequence at a time ---------------------------------------------


@st.composite
def _batches(draw: st.DrawFn) -> dict[str, Any]:
    """A ragged batch: tokens already there and new ones of each, and options of the attention."""
    counts = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4))
    return {
        "counts": counts,
        "seed": draw(st.integers(0, 2**16)),
        "window": draw(st.sampled_from([0, 1, 3, 100])),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "sinks": draw(st.booleans()),
        "style": draw(st.sampled_from(["none", "half", "interleaved"])),
        "rotary": draw(st.sampled_from([4, 8])),
    }


def _tables(counts: list[tuple[int, int]], seed: int) -> Tensor:
    """Pages [sequences, width] of each, scattered; unused entries point at page 0 of nobody."""
    needed = [-(-sum(count) // PAGE) for count in counts]
    order = (
        1 + torch.randperm(sum(needed), generator=torch.Generator().manual_seed(seed))
    ).tolist()
    rows = [[order.pop() for _ in range(n)] for n in needed]
    return torch.tensor([row + [0] * (max(needed) - len(row)) for row in rows], dtype=torch.int32)


@given(_batches())
@settings(deadline=None, max_examples=60)
def test_pages_give_what_one_sequence_gives(batch: dict[str, Any]):
    """Two steps over pages full of NaN equal attention over each whole sequence."""
    counts, seed, heads, kv_heads, dim = batch["counts"], batch["seed"], 4, 2, 8
    tables = _tables(counts, seed)
    sinks = _rand(heads, seed=seed + 9) if batch["sinks"] else None
    kv = torch.full((int(tables.max()) + 1, 2, 2, kv_heads, dim * PAGE), float("nan"))
    whole = [
        tuple(_rand(sum(c), h, dim, seed=seed + 10 * i + h) for h in (heads, kv_heads))
        for i, c in enumerate(counts)
    ]
    angles = [_rand(sum(c), batch["rotary"], seed=seed + i) for i, c in enumerate(counts)]

    def run(sequences: list[int], spans: list[tuple[int, int]]) -> list[Tensor]:
        def joined(parts: list[Tensor]) -> Tensor:
            return torch.cat([parts[s][a:b] for s, (a, b) in zip(sequences, spans, strict=True)])

        q, k = (joined([w[i] for w in whole]) for i in (0, 1))
        table = joined(angles)
        lengths = [b - a for a, b in spans]
        starts = torch.tensor(
            [sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32
        )
        before = torch.tensor([a for a, _ in spans], dtype=torch.int32)
        turn = (None, None) if batch["style"] == "none" else (table.cos(), table.sin())
        out = ops.paged_attention(
            *(q, k, 2 * k, *turn, sinks, kv, tables[sequences], starts, before, 1, PAGE),
            *(0.3, batch["window"], batch["softcap"], batch["style"]),
        )
        return list(out.split(lengths))

    first = [i for i, (before, _) in enumerate(counts) if before]
    early = (
        dict(zip(first, run(first, [(0, counts[i][0]) for i in first]), strict=True))
        if first
        else {}
    )
    late = run(list(range(len(counts))), [(before, before + new) for before, new in counts])
    for i, (q, k) in enumerate(whole):
        turned = [q, k]
        if batch["style"] != "none":
            cos, sin = angles[i].cos()[:, None], angles[i].sin()[:, None]
            turned = [rope_reference(x, cos, sin, batch["style"]) for x in (q, k)]
        rows = [x.transpose(0, 1)[None] for x in (*turned, 2 * k)]
        wanted = ops.attention(*rows, sinks, 0, 0.3, batch["window"], batch["softcap"])[0].flatten(
            1
        )
        got = torch.cat([early[i], late[i]]) if i in early else late[i]
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    assert bool(kv[:, 0].isnan().all())  # the other layer of the pool is untouched
