"""Candidates of `sitsc tune build`: which, that they are compiled, and that a table gives them."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.codegen import aot
from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.cuda_candidates import candidates
from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.tune import build, spread
from sitsc.core.errors import ArtifactError, CompileError
from sitsc.core.hardware import CudaLimits, load_target
from sitsc.core.kernel_meta import read_kernel_meta
from sitsc.core.tiles import TileEntry, shape_of
from sitsc.core.tuning import TUNE, read_tune_set
from tests import cuda_kernels
from tests.commands.command_line import call


def limits(target: str) -> CudaLimits:
    found = load_target(target).cuda
    assert found is not None
    return found


H200 = limits("h200")
DOWN = Linear(4096, 14336, epilogue="residual")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITSC_CACHE", str(cache))


@given(st.integers(0, 200), st.sampled_from([1, 2, 8, 32, 64]))
def test_a_selection_is_of_the_wanted_size_without_repeats(most, tokens):
    found = candidates(DOWN, tokens, H200)
    chosen = spread(found, most)
    assert len(chosen) == min(most, len(found))
    assert all(chosen.count(one) == 1 and one in found for one in chosen)
    assert not chosen or chosen[0] == found[0]


@pytest.mark.parametrize("tokens", [1, 8, 32])
def test_a_selection_is_spread_over_the_tiles(tokens):
    chosen = spread(candidates(DOWN, tokens, H200), 16)
    assert len({one.tile["block_k"] for one in chosen}) >= 3
    assert len({one.tile.get("stages", 0) for one in chosen}) >= 2
    assert len({one.tile.get("split", 1) for one in chosen}) >= 2


def test_kernels_that_spill_are_left_out(tmp_path):
    spills, fits = cuda_kernels.matmul(256, 256, 32, 4, 2), cuda_kernels.add()
    refused: list[CompileError] = []
    metas = aot.compile_kernels([spills, fits], 90, tmp_path, refused=refused)
    assert [meta.key for meta in metas] == [fits.key()]
    assert len(refused) == 1 and "spills" in str(refused[0])
    assert not list(tmp_path.rglob(f"{spills.key()}.*"))


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_table_with_a_case_gives_its_kernel_and_grid(tmp_path, tokens):
    op = Linear(96, 256, norm=True, eps=1e-5, epilogue="glu")
    made, refused = build([asdict(op)], [tokens], 3, "h200", H200, tmp_path)
    assert len({case.key for case in made.cases}) + len(refused) in (2, 3)
    assert made.cases[0].current and not any(case.current for case in made.cases[1:])
    for case in made.cases:
        provider = CudaProvider("h200", H200)
        entry = (*shape_of(case.shape), tokens, tokens, case.kernel, case.tile, {})
        provider.entries = (TileEntry(*entry),)
        info = provider.linear(case.shape, tokens)
        assert info is not None
        assert (info.key, info.grid) == (case.key, case.grid)
        assert (info.num_partials, info.num_counters) == (case.partials, case.counters)
    assert read_tune_set(tmp_path) == made


def test_the_command_builds_for_every_linear_layer(tmp_path: Path, capfd):
    out = tmp_path / "made"
    arguments = ("tune", "build", "h100", "--model", "tiny-llama", "-o", out)
    result = call(capfd, *arguments, "--tokens", "8,1", "--most", 2, "--json")
    assert result.code == 0, result
    told, found = json.loads(result.out), read_tune_set(out)
    assert (found.target, found.sm) == ("h100", 90)
    assert told["kernels"] == len({case.key for case in found.cases}) <= 20
    groups = found.groups()
    assert len(groups) == 10  # qkv, o, gate·up, down and lm_head, at 1 and at 8 tokens
    epilogues = sorted(group[0].shape["epilogue"] for group in groups if group[0].tokens == 1)
    assert epilogues == ["glu", "residual", "residual", "store", "store"]
    assert {case.shape["out_dtype"] for case in found.cases} == {"bf16", "fp32"}
    for case in found.cases:
        path = out / f"kernels/sm_90/{case.key}.json"
        assert read_kernel_meta(path.read_text()).key == case.key
        assert path.with_suffix(".cubin").is_file() and not path.with_suffix(".py").exists()
    call(capfd, *arguments).refused(2, "not empty")


@pytest.mark.parametrize(
    ("target", "options", "part"),
    [
        ("h200", ("--tokens", "0,1"), "--tokens"),
        ("h200", ("--tokens", "65"), "--tokens"),
        ("h200", ("--tokens", "some"), "--tokens"),
        ("h200", ("--most", 0), "--most 0"),
        ("h300", (), "unknown target"),
        ("cpu", (), "no tile table"),
    ],
)
def test_refused(tmp_path: Path, capfd, target, options, part):
    arguments = ("tune", "build", target, "--model", "tiny-llama", "-o", tmp_path / "made")
    call(capfd, *arguments, *options).refused(2, part)
    assert not (tmp_path / "made" / TUNE).exists()


def test_a_folder_without_candidates_is_refused(tmp_path: Path):
    with pytest.raises(ArtifactError, match="sitsc tune build"):
        read_tune_set(tmp_path)
    (tmp_path / TUNE).write_text('{"schema": 9, "target": "h200", "sm": 90, "cases": []}')
    with pytest.raises(ArtifactError, match="schema 9"):
        read_tune_set(tmp_path)
