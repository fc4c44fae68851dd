"""Attention on the CPU through ctypes, against plain torch, for every variant that runs here."""

import dataclasses
import math

import pytest
import torch
from attention_cases import Attention
from cpu_checks import BF16, F32, INT8, TOLERANCE, Guarded, error_of

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
