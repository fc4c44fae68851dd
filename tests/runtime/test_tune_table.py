"""From measurements to table entries; on a GPU, a whole run over a folder of candidates.

SITSC_GPU_TUNE names a folder that `sitsc tune build` wrote for the GPU of the machine.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sitsc.core.tiles import choose_linear, read_entries
from sitsc.core.tuning import TuneCase, read_tune_set
from sitsc.runtime.tune import LayerResult, entries, run
from sitsc.runtime.tune_chain import copies, weight_bytes

SHAPE: dict[str, Any] = {
    "rows": 4096,
    "columns": 4096,
    "norm": False,
    "eps": 0.0,
    "offset": 0.0,
    "epilogue": "residual",
    "activation": "silu",
    "bias": False,
    "out_dtype": "bf16",
}
TILE = {"block_n": 64, "block_k": 128}
CASE = TuneCase(SHAPE, 8, "skinny", TILE, True, "0", (64,), 0, 0)
RESULT = LayerResult(SHAPE, 8, CASE, 8.25, 9.0, 12.0, 7.39, 5, 0, ())


def test_entries_cover_the_counts_around_those_measured():
    results = [
        replace(RESULT, tokens=1, best=replace(CASE, tokens=1, kernel="gemv")),
        RESULT,
        replace(RESULT, tokens=64, best_us=15.0),
    ]
    made = entries(results, (), "a GPU")
    assert [(e.low, e.high, e.kernel) for e in made] == [
        (1, 1, "gemv"),
        (3, 16, "skinny"),
        (33, 64, "library"),
    ]
    assert made[1].tile == TILE and made[2].tile == {}
    evidence = made[1].evidence
    assert (evidence["us"], evidence["library_us"], evidence["gpu"]) == (8.25, 12.0, "a GPU")
    assert evidence["torch"] == torch.__version__ and evidence["version"] and evidence["date"]
    chosen = choose_linear(tuple(made), SHAPE, 16, 132)
    assert (chosen.kernel, chosen.source) == ("skinny", "measured")


def test_the_library_must_win_with_what_it_lacks():
    close = replace(RESULT, library_us=6.0)
    assert close.library_wins()
    assert not replace(close, shape=SHAPE | {"norm": True}).library_wins()
    assert not replace(close, shape=SHAPE | {"epilogue": "glu"}).library_wins()
    assert not replace(close, shape=SHAPE | {"bias": True}).library_wins()
    assert replace(close, best=None, best_us=None).library_wins()


def test_entries_of_other_shapes_are_kept_and_those_of_the_same_replaced():
    other = replace(RESULT, shape=SHAPE | {"rows": 128})
    before = tuple(entries([other, replace(RESULT, best_us=9.0)], (), "old"))
    made = entries([RESULT], before, "new")
    assert sorted((e.rows, e.evidence["gpu"]) for e in made) == [(128, "old"), (4096, "new")]
    assert entries([replace(RESULT, best=None, best_us=None, library_us=None)], (), "new") == []


@pytest.mark.parametrize("rows", [64, 4096, 128256])
def test_a_chain_reads_more_than_the_cache_and_fits(rows):
    shape, l2 = SHAPE | {"rows": rows}, 60 << 20
    count = copies(shape, l2, 140 << 30)
    assert 16 <= count <= 32
    assert count == 32 or count * weight_bytes(shape) >= 16 * l2
    assert copies(shape, l2, 4 * weight_bytes(shape)) == 2


@pytest.mark.gpu
def test_a_run_writes_a_table(tmp_path: Path):
    folder = os.environ.get("SITSC_GPU_TUNE", "")
    if not folder or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_TUNE")
    table = tmp_path / "table.json"
    results = run(Path(folder), table, seconds=2.0)
    made = read_entries(table.read_text(), "table")
    assert len(made) == len(results) == len(read_tune_set(Path(folder)).groups())
    assert all(result.measured and not result.dropped for result in results)
    assert all(result.best_us and 0.8 * result.limit_us < result.best_us for result in results)
