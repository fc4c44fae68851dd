"""Candidates of `sitsc tune build`: which, that they are compiled, and that a table gives them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.codegen import aot
from sitsc.codegen.cuda_candidates import candidates
from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.tune import VariedProvider, choices, heads
from sitsc.codegen.tune_linear import Choice, spread
from sitsc.core.errors import ArtifactError, CompileError
from sitsc.core.kernel_meta import read_kernel_meta
from sitsc.core.tiles import TileEntry, TileTable, table_text
from sitsc.core.tuning import TUNE, TuneSubject, read_tune_set
from tests import cuda_kernels
from tests.commands.command_line import call
from tests.cuda_shapes import LINEAR, limits

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
    assert len({one.tile.get("block_k", 64) for one in chosen}) >= 3
    assert len({one.tile.get("stages", 0) for one in chosen}) >= 2
    assert len({one.tile.get("split", 1) for one in chosen}) >= 2


def test_kernels_that_spill_are_left_out(tmp_path):
    spills, fits = cuda_kernels.matmul(256, 256, 32, 4, 2), cuda_kernels.add()
    refused: list[CompileError] = []
    metas = aot.compile_kernels([spills, fits], 90, tmp_path, refused=refused)
    assert [meta.key for meta in metas] == [fits.key()]
    assert len(refused) == 1 and "spills" in str(refused[0])
    assert not list(tmp_path.rglob(f"{spills.key()}.*"))


GLU = LINEAR | {"norm": True, "eps": 1e-5, "epilogue": "glu"}
ATTENTION: dict[str, Any] = {
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "rotary_dim": 128,
    "rope_style": "half",
    "page_tokens": 64,
    "scale": 0.1,
    "window": 0,
    "softcap": 0.0,
    "sinks": False,
}


@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 128, 256])
@pytest.mark.parametrize("kind", ["linear", "attention"])
def test_every_choice_gives_kernels_of_its_tile(tokens, kind):
    subject = TuneSubject(kind, GLU if kind == "linear" else ATTENTION)
    found = choices(subject, tokens, TileTable(), H200, 9)
    assert found[0].current and not any(choice.current for choice in found[1:])
    provider, keys = VariedProvider("h200", H200, None), set()
    for choice in found:
        provider.vary(subject, tokens, choice)
        if kind == "attention":
            infos = provider.attention(ATTENTION | {"sequences": tokens}, "decode")
            splits = choice.tile["splits"]
            assert len(infos) == 1 + (choice.tile["merge"] == 2)
            assert infos[0].grid == (("sequences", 8, splits) if splits > 1 else ("sequences", 8))
        else:
            info = provider.linear(GLU, tokens)
            assert (info is None) == (choice.kernel == "library")
            infos = () if info is None else (info,)
            for one in infos:
                apart = "norm_ptr" not in dict(one.arguments)
                assert apart == bool(choice.tile.get("separate_norm"))
        keys |= {(info.key, info.grid) for info in infos}
        assert all(
            info.tile == choice.tile or info.template == "attention_reduce" for info in infos
        )
    assert len(keys) >= 5 or tokens > 128
    assert heads(ATTENTION).group == 4


def test_the_command_builds_steps_with_alternatives(tmp_path: Path, capfd):
    out = tmp_path / "made"
    arguments = ("tune", "build", "h100", "--model", "tiny-llama", "-o", out)
    result = call(capfd, *arguments, "--tokens", "8,1", "--most", 2, "--json")
    assert result.code == 0, result
    told, found = json.loads(result.out), read_tune_set(out)
    assert (found.target, found.sm) == ("h100", 90)
    assert [chain.tokens for chain in found.chains] == [1, 8]
    kinds = sorted(subject.shape.get("epilogue", "attention") for subject in found.subjects)
    assert kinds == ["attention", "glu", "residual", "residual", "store", "store"]
    used = set()
    for chain in found.chains:
        places = {place for group in chain.groups for place in group.places}
        tuned = {place for case in chain.cases for place in case.launches}
        assert tuned | set(chain.fixed) == places
        changed = [chain.fixed[place] for place in tuned & set(chain.fixed)]
        assert {one.template for many in changed for one in many} <= {"rms_norm", "gather"}
        assert {case.subject for case in chain.cases if case.current} == set(range(6))
        for case in chain.cases:
            launches = [one for many in case.launches.values() for one in many]
            arena = {a.buffer for one in launches for a in one.arguments if a.source == "arena"}
            assert arena <= set(chain.buffers) | INPUTS
            used |= {one.kernel for one in launches if one.kind == "kernel"}
    assert told["kernels"] >= len(used)
    for key in used:
        path = out / f"kernels/sm_90/{key}.json"
        assert read_kernel_meta(path.read_text()).key == key
        assert path.with_suffix(".cubin").is_file() and not path.with_suffix(".py").exists()
    call(capfd, *arguments).refused(2, "not empty")


def test_alternatives_that_leave_parts_bring_the_kernels_that_add_them(tmp_path: Path, capfd):
    shapes = ((128, 64, True, "store", "bf16"), (64, 64, False, "residual", "bf16"))
    shapes += ((128, 64, True, "glu", "bf16"), (64, 128, False, "residual", "bf16"))
    shapes += ((320, 64, True, "store", "fp32"),)
    apart = (("glu", "bf16"), ("store", "fp32"))
    common = {"block_t": 16, "block_n": 16, "block_k": 32, "stages": 2, "num_warps": 4}
    entries = [
        TileEntry(
            *shape,
            3,
            16,
            "skinny",
            common
            | ({"separate_norm": 1} if shape[2] else {})
            | ({"split": 1} if shape[3:] in apart else {"split": 2, "parts": 1}),
            {},
        )
        for shape in shapes
    ]
    table, out = tmp_path / "table.json", tmp_path / "made"
    table.write_text(table_text(TileTable(tuple(entries))))
    arguments = ("tune", "build", "h100", "--model", "tiny-llama", "--tokens", "8", "--most", 6)
    assert call(capfd, *arguments, "--table", table, "-o", out, "--json").code == 0
    found = read_tune_set(out)
    (chain,) = found.chains
    tuned = {p for case in chain.cases for p in case.launches if p not in chain.fixed}
    moved = 0
    for case in chain.cases:
        subject = found.subjects[case.subject]
        if subject.kind == "attention" or case.kernel == "library":
            continue
        now = next(c for c in chain.cases if c.subject == case.subject and c.current)
        assert case.tile.get("parts", 0) == now.tile.get("parts", 0)
        if subject.shape["norm"]:
            assert case.tile["separate_norm"]
        others = {p for p in case.launches if p in chain.fixed}
        same = [k for k in ("split", "separate_norm") if case.tile.get(k) == now.tile.get(k)]
        assert bool(others) == (len(same) < 2)
        moved += bool(others)
        for place in others:
            assert {one.template for one in case.launches[place]} <= {"rms_norm", "gather"}
    assert moved and tuned
    call(capfd, *arguments, "--table", tmp_path / "none", "-o", tmp_path / "x").refused(
        2, "--table"
    )


def test_alternatives_leave_as_many_sums_for_a_norm(tmp_path: Path, capfd):
    """Residual sums that are scaled for a norm stay so: their readers add a sum of each program."""
    shapes = ((64, 64, False, "residual", "bf16"), (64, 128, False, "residual", "bf16"))
    tile = {"block_t": 8, "block_n": 32, "block_k": 32, "fold": 2, "stages": 2, "num_warps": 4}
    tile |= {"split": 1, "ahead": 1, "scaled": 1}
    entries = tuple(TileEntry(*shape, 3, 16, "skinny", tile, {}) for shape in shapes)
    table, out = tmp_path / "table.json", tmp_path / "made"
    table.write_text(table_text(TileTable(entries)))
    arguments = ("tune", "build", "h100", "--model", "tiny-llama", "--tokens", "8", "--most", 6)
    assert call(capfd, *arguments, "--table", table, "-o", out, "--json").code == 0
    found = read_tune_set(out)
    (chain,) = found.chains
    residual = [
        case
        for case in chain.cases
        if found.subjects[case.subject].shape.get("epilogue") == "residual"
    ]
    assert len({json.dumps(case.tile) for case in residual}) >= 4
    for case in residual:
        assert case.kernel == "skinny" and case.tile["scaled"] == 1
        launches = [one for many in case.launches.values() for one in many]
        assert {one.tile["scaled"] for one in launches} == {2}
    fixed = {one.template for many in chain.fixed.values() for one in many}
    assert "gather" in fixed and "rms_norm" not in fixed


def test_wide_kernels_are_no_alternative_to_sums_that_are_scaled():
    tile = {"block_t": 16, "block_n": 64, "block_k": 64, "stages": 2, "num_warps": 4, "scaled": 1}
    table = TileTable(
        (TileEntry(4096, 4096, False, "residual", "bf16", 9, 16, "skinny", tile, {}),)
    )
    found = choices(TuneSubject("linear", LINEAR), 16, table, H200, 40)
    assert {choice.kernel for choice in found} == {"skinny"}
    assert all(choice.tile["scaled"] for choice in found)
    wide = {"block_t": 64, "block_n": 64, "split": 1, "stages": 4, "scaled": 1}
    provider = VariedProvider("h200", H200, table)
    provider.vary(TuneSubject("linear", LINEAR), 16, Choice("wide", wide, 0))
    info = provider.linear(LINEAR, 16, ahead=0.0)
    assert info is not None and info.template == "wide" and "scaled" not in info.tile


INPUTS = {"token_ids", "position_ids", "logit_rows", "block_table", "query_start", "context_lens"}


@pytest.mark.parametrize(
    ("target", "options", "part"),
    [
        ("h200", ("--tokens", "0,1"), "--tokens"),
        ("h200", ("--tokens", "257"), "--tokens"),
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
    (tmp_path / TUNE).write_text('{"schema": 9, "target": "h200", "sm": 90}')
    with pytest.raises(ArtifactError, match="schema 9"):
        read_tune_set(tmp_path)
