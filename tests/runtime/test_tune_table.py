"""From measurements to table entries; on a GPU, a whole run over a folder of candidates.

SITSC_GPU_TUNE names a folder that `sitsc tune build` wrote for the GPU of the machine.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sitsc.core.tiles import TileTable, choose_attention, choose_linear
from sitsc.core.tuning import TuneCase, TuneSubject, contexts, read_tune_set
from sitsc.runtime.tune import SubjectResult, merged, run, table_of
from tests.cuda_shapes import LINEAR as SHAPE

TILE = {"block_n": 64, "block_k": 128}
CASE = TuneCase(0, 0, "skinny", TILE, True, {})
RESULT = SubjectResult(
    TuneSubject("linear", SHAPE), 8, CASE, {128: 900.0}, {128: 8.25}, 1.05, 1.02, 5, 0, (), 100
)
HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}


def test_entries_cover_the_counts_around_those_measured():
    results = [
        replace(RESULT, tokens=1, best=replace(CASE, kernel="gemv")),
        RESULT,
        replace(RESULT, tokens=64, best=replace(CASE, kernel="library", tile={})),
    ]
    made = merged(results, TileTable(), "a GPU").linear
    assert [(e.low, e.high, e.kernel) for e in made] == [
        (1, 1, "gemv"),
        (3, 16, "skinny"),
        (33, 64, "library"),
    ]
    assert made[1].tile == TILE and made[2].tile == {}
    evidence = made[1].evidence
    assert (evidence["us"], evidence["library"], evidence["gpu"]) == ({"128": 8.2}, 1.02, "a GPU")
    assert evidence["torch"] == torch.__version__ and evidence["version"] and evidence["date"]
    chosen = choose_linear(made, SHAPE, 16, 132)
    assert (chosen.kernel, chosen.source) == ("skinny", "measured")


def test_a_tile_of_tokens_bounds_a_skinny_kernel_alone():
    """A wide kernel has as many tiles of tokens as it takes."""
    narrow = replace(CASE, tile=TILE | {"block_t": 8})
    wide = replace(CASE, kernel="wide", tile=TILE | {"block_t": 128})
    results = [replace(RESULT, best=narrow), replace(RESULT, tokens=256, best=wide)]
    made = merged(results, TileTable(), "a GPU").linear
    assert [(e.low, e.high, e.kernel) for e in made] == [(3, 8, "skinny"), (129, 256, "wide")]


def test_attention_covers_all_counts_up_to_the_measured_one():
    tile = {"block": 64, "splits": 16}
    case = replace(CASE, kernel="attention_decode", tile=tile)
    one = replace(RESULT, subject=TuneSubject("attention", HEADS), best=case)
    made = merged([one, replace(one, tokens=64)], TileTable(), "a GPU").attention
    assert [(entry.low, entry.high) for entry in made] == [(1, 8), (9, 64)]
    assert choose_attention(made, HEADS, 48, 132).tile == tile | {"carveout": RESULT.carveout}
    assert choose_attention(made, HEADS, 65, 132).source == "rule"


def test_entries_are_replaced_where_new_ones_stand_and_kept_elsewhere():
    other = replace(RESULT, subject=TuneSubject("linear", SHAPE | {"rows": 128}))
    wide = replace(RESULT, tokens=64, best=replace(CASE, tile={"block_n": 128}))
    before = merged([other, RESULT, wide], TileTable(), "old")
    made = merged([RESULT], before, "new").linear
    found = sorted((e.rows, e.low, e.high, e.evidence["gpu"]) for e in made)
    assert found == [(128, 3, 16, "old"), (4096, 3, 16, "new"), (4096, 33, 64, "old")]


def test_contexts_fit_the_memory_of_a_pool():
    for sequences in (1, 8, 32, 64, 256):
        lengths = contexts(sequences)
        assert lengths[0] == 192 and max(lengths) * sequences <= 131072
        assert list(lengths) == sorted(set(lengths))


@pytest.mark.gpu
def test_a_run_writes_a_table(tmp_path: Path):
    folder = os.environ.get("SITSC_GPU_TUNE", "")
    if not folder or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_TUNE")
    table = tmp_path / "table.json"
    results = run(Path(folder), table, seconds=2.0)
    made, tune_set = table_of(table), read_tune_set(Path(folder))
    assert len(made.linear) + len(made.attention) == len(results)
    assert {r.tokens for r in results} == {chain.tokens for chain in tune_set.chains}
    assert all(result.measured and not result.dropped for result in results)
    assert all(result.gain > 0.98 for result in results)
