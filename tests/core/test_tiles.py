"""Tile tables: their text, which entry is taken, and the token counts that a measurement covers."""

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.errors import PlanError
from sitsc.core.hardware import target_names
from sitsc.core.tiles import (
    AttentionEntry,
    TileEntry,
    TileTable,
    choose_attention,
    choose_linear,
    load_table,
    read_table,
    table_text,
    wide_bytes,
)
from sitsc.core.tuning import MOST_TOKENS, token_range
from tests.cuda_shapes import limits

SHAPE: dict[str, Any] = {
    "rows": 6144,
    "columns": 4096,
    "norm": True,
    "epilogue": "store",
    "out_dtype": "bf16",
}
TILE = {"block_n": 4, "block_k": 2048, "programs": 264}
ENTRY = TileEntry(6144, 4096, True, "store", "bf16", 1, 2, "gemv", TILE, {"us": 13.9, "gpu": "G"})
HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
HEADS_TILE = {"block": 64, "stages": 3, "num_warps": 4, "splits": 16, "share": 2, "merge": 1}
HEADS_ENTRY = AttentionEntry(32, 8, 128, 1, 2, HEADS_TILE, {"us": 4.0})


def test_a_table_comes_back_as_it_was_written():
    library = dataclasses.replace(ENTRY, low=3, high=16, kernel="library", tile={})
    other = dataclasses.replace(ENTRY, rows=128, norm=False, out_dtype="fp32")
    text = table_text(TileTable((library, ENTRY, other), (HEADS_ENTRY,)))
    assert read_table(text, "table") == TileTable((other, ENTRY, library), (HEADS_ENTRY,))
    assert table_text(read_table(text, "table")) == text
    assert len(text.splitlines()) == 8
    assert read_table(table_text(TileTable()), "table") == TileTable()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"linear": [{"rows": 1}]}', '{"linear": {}}', '{"more": 1, "linear": []}']
)
def test_a_damaged_table_is_refused_by_name(text):
    with pytest.raises(PlanError, match="tiles/gpu"):
        read_table(text, "tiles/gpu")


@pytest.mark.parametrize("target", target_names())
def test_tables_of_all_targets_can_be_read(target):
    table = load_table(target)
    for entry in (*table.linear, *table.attention):
        assert 1 <= entry.low <= entry.high and entry.evidence


def test_a_measured_entry_goes_before_the_rule():
    chosen = choose_linear((ENTRY,), SHAPE, 2, 132)
    assert (chosen.kernel, chosen.tile, chosen.source) == ("gemv", TILE, "measured")
    assert choose_linear((ENTRY,), SHAPE, 3, 132).source == "rule"
    library = dataclasses.replace(ENTRY, low=3, high=16, kernel="library", tile={})
    assert choose_linear((ENTRY, library), SHAPE, 8, 132).kernel == "library"


@given(
    st.sampled_from([(28672, 8192), (14336, 4096), (8192, 2048), (1000, 5000), (4096, 14336)]),
    st.sampled_from(["glu", "residual"]),
    st.integers(33, 128),
    st.booleans(),
)
def test_the_rule_for_wide_kernels_fits(size, epilogue, tokens, norm):
    found = limits("h100")
    shape = {"rows": size[0], "columns": size[1], "norm": norm, "epilogue": epilogue}
    shape |= {"out_dtype": "bf16"}
    chosen = choose_linear((), shape, tokens, found.num_sms, wide_bytes(found))
    tile, glu = chosen.tile, epilogue == "glu"
    assert (chosen.kernel, chosen.source) == ("wide", "rule")
    stage = ((2 if glu else 1) * tile["block_n"] + tile["block_t"]) * 128
    assert 3 <= tile["stages"] <= 8 and tile["stages"] * stage < found.shared_bytes
    assert tile["block_t"] == (64 if tokens <= 64 else 128)
    assert tile.get("parts", 0) == (not glu) and (tile["split"] == 1 or not glu)
    assert tile.get("separate_norm", 0) == norm
    programs = -(-size[0] // tile["block_n"]) * tile["split"]
    assert programs >= min(0.45 * found.num_sms, size[0] / 64)


def test_the_rule_takes_wide_kernels_only_where_they_were_faster():
    room, shape = wide_bytes(limits("h200")), SHAPE | {"epilogue": "glu"}
    kernels = [choose_linear((), shape, n, 132, room).kernel for n in (2, 32, 33, 128, 129)]
    assert kernels == ["gemv", "skinny", "wide", "wide", "library"]
    for other in ({"epilogue": "store"}, {"columns": 4100}, {"rows": 100}):
        assert choose_linear((), shape | other, 64, 132, room).kernel == "skinny"
    assert choose_linear((), shape, 64, 132).kernel == "skinny"
    assert [wide_bytes(limits(target)) for target in ("a100", "l40s", "b200")] == [0, 0, 0]


def test_attention_has_entries_and_a_rule():
    assert choose_attention((HEADS_ENTRY,), HEADS, 2, 132).tile == HEADS_TILE
    assert choose_attention((HEADS_ENTRY,), HEADS | {"head_dim": 64}, 2, 132).source == "rule"
    for sequences in (1, 3, 8, 64, 256):
        tile = choose_attention((HEADS_ENTRY,), HEADS, sequences + 2, 132).tile
        assert (tile["merge"] > 0) == (tile["splits"] > 1)
        assert 4 * tile["stages"] * tile["block"] * 128 <= 96 << 10


@pytest.mark.parametrize(
    "change",
    [{"rows": 1}, {"columns": 1}, {"norm": False}, {"epilogue": "glu"}, {"out_dtype": "fp32"}],
)
def test_an_entry_is_for_its_shape_alone(change):
    assert choose_linear((ENTRY,), SHAPE | change, 1, 132).source == "rule"


def test_a_wide_residual_stream_has_the_same_tiles():
    shape = SHAPE | {"norm": False, "epilogue": "residual"}
    entry = dataclasses.replace(ENTRY, norm=False, epilogue="residual")
    for kind in ("bf16", "fp32"):
        assert choose_linear((entry,), shape | {"out_dtype": kind}, 1, 132).source == "measured"


def test_ranges_of_the_usual_counts():
    counts = (1, 2, 8, 32, 64)
    found = [token_range(count, counts, "skinny") for count in counts]
    assert found == [(1, 1), (2, 2), (3, 16), (17, 32), (33, 64)]
    assert token_range(4, (4,), "gemv") == (3, 4)
    assert token_range(4, (4, 8), "skinny") == (3, 4)
    assert token_range(8, (4, 8), "skinny") == (5, 16)


@given(st.sets(st.integers(1, MOST_TOKENS), min_size=1), st.sampled_from(["gemv", "skinny"]))
def test_ranges_hold_their_count_and_never_overlap(counts, kernel):
    measured = tuple(sorted(counts))
    ranges = [token_range(count, measured, kernel) for count in measured]
    for count, (low, high) in zip(measured, ranges, strict=True):
        assert 1 <= low <= count <= high <= MOST_TOKENS
    for (_, before), (after, _) in itertools.pairwise(ranges):
        assert before < after
