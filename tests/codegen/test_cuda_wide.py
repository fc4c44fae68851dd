"""The linear kernel for 9-256 tokens on sm_90: machine code without a GPU, who takes it, tiles.

Gluon has no interpreter: that it computes what it should is checked on a GPU, tests/gpu/wide_cases.
"""

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sitsc.codegen import aot, aot_kernel
from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.cuda_candidates import candidates
from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.cuda_templates import Sizes, grid, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.codegen.tune import choices
from sitsc.core.errors import CompileError
from sitsc.core.tiles import (
    TileEntry,
    TileTable,
    choose_linear,
    load_table,
    wide_bytes,
    wide_supported,
)
from sitsc.core.tuning import TuneSubject, read_tune_set
from tests.commands.command_line import call
from tests.cuda_shapes import LINEAR, limits
from tests.gpu.wide_cases import DOWN, GLU, O_PARTS, QKV, wide_checks

TILE = {"block_t": 128, "block_n": 64, "split": 4, "stages": 4}
SHAPE = LINEAR | {"columns": 14336, "out_dtype": "fp32"}


def provider(target: str, shape: dict[str, Any], **tile: int) -> CudaProvider:
    """A provider whose table has the wide kernel for a shape."""
    key = (shape["rows"], shape["columns"], shape["norm"], shape["epilogue"])
    dtype = "bf16" if shape["epilogue"] == "residual" else shape["out_dtype"]
    made = CudaProvider(target, limits(target))
    made.table = TileTable((TileEntry(*key, dtype, 65, 256, "wide", tile, {}),))
    return made


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "cache"))


def test_kernels_do_not_spill_fit_and_are_the_same_bytes(tmp_path, monkeypatch):
    checks = wide_checks()
    sources = {s.key(): (check, s) for check in checks.values() for s in check.sources(pdl=True)}
    metas = aot.compile_kernels([source for _, source in sources.values()], 90, tmp_path / "a")
    assert len(metas) == len(sources) >= 12
    for meta in metas:
        aot_kernel.check_limits(meta, limits("h200").shared_bytes)
        check, source = sources[meta.key]
        tokens = check.tile["block_t"]
        boxes = [item["block_size"] for item in meta.tensor_maps]
        assert boxes == [[tokens, 64], [check.tile["block_n"], 64]]
        assert meta.num_warps == tokens // 16 and not meta.spill_bytes
        assert len(source.text.splitlines()) < 140
    monkeypatch.setenv("SITSC_CACHE", str(tmp_path / "another"))
    first = sources[metas[0].key][1]
    aot.compile_kernels([first], 90, tmp_path / "b")
    name = f"kernels/sm_90/{first.key()}.cubin"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("op", [QKV, replace(QKV, epilogue="residual"), GLU, DOWN])
def test_before_the_wait_only_weights_are_copied(op: Linear):
    source = instance("wide", op, tokens=128, block_t=128, block_n=64, stages=4)
    text = aot_kernel._compile(source, 90).asm["ptx"]
    assert text.count("griddepcontrol.wait") == 1
    before, after = text.split("griddepcontrol.wait")
    assert not re.search(r"ld\.global|st\.global|cp\.async\.c|atom|red\.", before)
    copies = re.findall(r"cp\.async\.bulk\.tensor\S* \[%r\d+\], \[(%rd\d+),", text)
    ahead = re.findall(r"cp\.async\.bulk\.tensor\S* \[%r\d+\], \[(%rd\d+),", before)
    assert len(ahead) == 3 * op.sides and len(set(ahead)) == 1, "W alone, as far as there is room"
    assert len(set(copies)) == 2 and "wgmma.mma_async" in after and "mma.sync" not in text


def test_grids_cover_rows_shares_and_tokens():
    def programs(op: Linear, tokens: int, **tile: int) -> int:
        source = instance("wide", op, tokens=tokens, **tile)
        x, y, z = grid(source, Sizes())
        assert (y, z) == (1, 1)
        return x

    assert programs(O_PARTS, 128, **TILE) == 64 * 4
    assert programs(O_PARTS, 129, **TILE) == 64 * 4 * 2
    assert programs(O_PARTS, 256, **(TILE | {"block_t": 256})) == 64 * 4
    assert programs(GLU, 64, block_n=64, stages=4, block_t=64) == 224
    assert programs(Linear(1537, 1000), 70, block_t=128, block_n=128, stages=3) == 13
    few = instance("wide", Linear(256, 40), tokens=9, block_t=64, block_n=32, stages=8)
    assert few.constants["STAGES"] == 2, "no more than there are blocks, and the one behind them"


@pytest.mark.parametrize(
    ("op", "tile", "what"),
    [
        (Linear(64, 64, norm=True, eps=1e-5), {}, "no wide kernel"),
        (Linear(64, 60), {}, "no wide kernel"),
        (Linear(64, 512), {"split": 2}, "in parts"),
        (Linear(64, 512, epilogue="residual"), {"split": 4}, "in parts"),
        (Linear(64, 512), {"block_t": 96}, "96 tokens a program"),
    ],
)
def test_refused(op, tile, what):
    with pytest.raises(CompileError, match=what):
        instance("wide", op, tokens=128, **({"block_t": 64, "block_n": 64, "stages": 4} | tile))


def test_a_table_gives_it_where_it_can_be_had_and_the_library_elsewhere():
    tile = {"parts": 1} | TILE
    info = provider("h200", SHAPE, **tile).linear(SHAPE, 200, parts=True)
    assert info is not None and (info.template, info.tile) == ("wide", tile)
    assert info.grid == (64 * 4 * 2,)
    names = [name for name, _ in info.arguments]
    assert names == ["x_map", "w_map", "parts_ptr", "num_tokens"]
    # Where the reader cannot add the parts, where the norm is inside, where columns are odd.
    assert provider("h200", SHAPE, **tile).linear(SHAPE, 200) is None
    whole = provider("h200", SHAPE, **(tile | {"split": 1})).linear(SHAPE, 200)
    assert whole is not None and "residual_ptr" in dict(whole.arguments)
    norm = SHAPE | {"norm": True, "eps": 1e-5, "epilogue": "store", "out_dtype": "bf16"}
    own = {"block_t": 128, "block_n": 64, "split": 1, "stages": 4}
    assert provider("h200", norm, **own).linear(norm, 128) is None
    apart = provider("h200", norm, **own, separate_norm=4).linear(norm, 128)
    assert apart is not None and "squares_ptr" in dict(apart.arguments)
    odd = norm | {"columns": 1001}
    assert provider("h200", odd, **own, separate_norm=1).linear(odd, 128) is None
    for target in ("a100", "l40s", "b200"):
        assert provider(target, SHAPE, **tile).linear(SHAPE, 200, parts=True) is None


def test_few_tokens_have_the_other_kernel_where_it_cannot_be_had():
    """By the rule as by a table: a sum that its reader cannot add, an odd width, another GPU."""

    def template(made: CudaProvider, shape: dict[str, Any], tokens: int, parts: bool) -> str:
        info = made.linear(shape, tokens, parts=parts)
        assert info is not None
        return info.template.removesuffix("_ahead")

    for target, shape, parts in (
        ("h100", SHAPE, False),
        ("h100", SHAPE | {"columns": 1004, "rows": 8192}, True),
        ("a100", SHAPE, True),
    ):
        made = CudaProvider(target, limits(target))
        assert template(made, shape, 48, parts) == "skinny", (target, shape)
    made = CudaProvider("h100", limits("h100"))
    assert template(made, SHAPE, 48, parts=True) == "wide"
    # Llama's q, k and v are wide at 32 tokens; with norms of heads their sums cannot stay in parts.
    row = SHAPE | {"rows": 6144, "columns": 4096, "norm": True, "eps": 1e-5, "epilogue": "store"}
    row |= {"out_dtype": "bf16"}
    measured = CudaProvider("h200", limits("h200"))
    assert template(measured, row, 32, parts=True) == "wide"
    assert template(measured, row, 32, parts=False) == "skinny"


@pytest.mark.parametrize("tokens", [9, 16, 33, 64, 65, 128, 129, 256])
@pytest.mark.parametrize("op", [QKV, O_PARTS, GLU, DOWN, Linear(2048, 2048)])
def test_candidates_fit(tokens: int, op: Linear):
    found = [c for c in candidates(op, tokens, limits("h200")) if c.template == "wide"]
    assert 4 < len(found) <= 80
    for one in found:
        source = instance("wide", op, tokens=tokens, **one.tile)
        size = {name: int(value) for name, value in source.constants.items()}
        rows, threads = size["BLOCK_N"] * op.sides, 2 * size["BLOCK_T"]
        assert size["BLOCK_T"] <= max(64, 2 * tokens)
        assert (rows + size["BLOCK_T"]) * 128 * size["STAGES"] < limits("h200").shared_bytes
        assert rows * size["BLOCK_T"] // threads <= min(128, 40_000 // threads), "registers"
        assert size["SPLIT"] == 1 or op.epilogue == "parts"


def table_sources() -> list[KernelSource]:
    """The wide kernels of the H200's table and of the rule, with all that a layer may bring."""
    gpu, found = limits("h200"), []
    entries = [e for e in load_table("h200").linear if e.kernel == "wide"]
    tiles = {(e.rows, e.columns, e.epilogue, json.dumps(e.tile)) for e in entries}
    for rows, columns in ((28672, 8192), (18944, 3584), (8192, 3072)):
        for epilogue, tokens in product(("glu", "residual"), (64, 128)):
            shape = {"rows": rows, "columns": columns, "norm": True, "epilogue": epilogue}
            shape |= {"out_dtype": "bf16"}
            chosen = choose_linear((), shape, tokens, gpu.num_sms, wide_bytes(gpu))
            tiles.add((rows, columns, epilogue, json.dumps(chosen.tile)))
    for rows, columns, epilogue, text in sorted(tiles):
        tile = json.loads(text)
        spread, parts = tile.pop("separate_norm", 1), tile.pop("parts", 0)
        squares, tile = 8 if spread > 1 else 0, tile | {"early": bool(tile.get("early", 1))}
        plain: dict[str, Any] = {
            "squares": squares,
            "eps": 1e-5,
            "epilogue": "parts" if parts else epilogue,
        }
        plain |= {"out_dtype": "fp32" if parts or epilogue == "store" else "bf16"}
        hard: dict[str, Any] = {} if parts else {"bias": True}
        if epilogue == "glu":
            hard |= {"activation": "gelu_erf"}
        for more in (plain, plain | hard):
            found.append(instance("wide", Linear(rows, columns, **more), tokens=128, **tile))
    return list({source.key(): source for source in found}.values())


def test_no_kernel_of_the_table_or_the_rule_spills(tmp_path: Path):
    """A spill is an error for whoever compiles; other models bring a bias or an activation."""
    sources = table_sources()
    metas = aot.compile_kernels(sources, 90, tmp_path)
    assert len(metas) == len(sources) > 30 and not any(meta.spill_bytes for meta in metas)


def test_candidates_end_where_it_does():
    op = Linear(4096, 4096)
    for count, target in ((8, "h200"), (257, "h200"), (128, "a100"), (128, "b200")):
        found = candidates(op, count, limits(target))
        assert not any(one.template == "wide" for one in found), (count, target)
    assert not candidates(op, 257, limits("h200"))
    assert not wide_supported(1001, 90) and not wide_supported(4096, 100)


@pytest.mark.parametrize(("model", "can_wait"), [("tiny-llama", True), ("tiny-gpt-oss", False)])
def test_the_tuner_tries_it_in_every_layer_of_the_library(model, can_wait, tmp_path: Path, capfd):
    """Also in residual layers, whose norm asks for other layers before it knows what to add.

    A layer with a bias cannot leave its sums: what would be another kernel is no alternative.
    """
    out = tmp_path / "made"
    arguments = ("tune", "build", "h200", "--model", model, "--tokens", "128", "--most", 3)
    assert call(capfd, *arguments, "-o", out, "--json").code == 0
    found = read_tune_set(out)
    (chain,) = found.chains
    assert {case.subject for case in chain.cases} == set(range(len(found.subjects)))
    tried = set()
    for case in chain.cases:
        shape = found.subjects[case.subject].shape
        if case.kernel != "wide":
            continue
        made = [one for many in case.launches.values() for one in many]
        ours = [one for one in made if one.template == "wide"]
        assert ours and not any(one.kind == "library" for one in made)
        shapes = {a.name: a.shape for a in ours[0].arguments}
        assert shapes["x_map"] == (128, shape["columns"]) and "w_map" in shapes
        assert case.tile.get("parts", 0) == (not shape["norm"])
        assert can_wait or not shape["bias"] or case.tile["split"] == 1
        tried.add(case.subject)
    linear = {n for n, s in enumerate(found.subjects) if s.kind == "linear"}
    assert tried == linear or not can_wait
    for number in linear:
        (first, *_) = [case for case in chain.cases if case.subject == number]
        assert first.current and first.kernel == "library"


def test_skinny_kernels_are_tried_where_there_is_no_wide_one():
    for target, wide in (("h200", True), ("a100", False)):
        subject = TuneSubject("linear", SHAPE | {"epilogue": "glu", "out_dtype": "bf16"})
        found = choices(subject, 96, TileTable(), limits(target), 12)
        kernels = {choice.kernel for choice in found if not choice.current}
        assert ("wide" in kernels) == wide and ("skinny" in kernels) == (not wide)


def test_the_library_is_tried_again_where_sums_stay_in_parts():
    subject = TuneSubject("linear", SHAPE)
    found = choices(subject, 128, TileTable(), limits("h200"), 6)
    assert found[0].current and found[0].kernel == "wide" and found[0].tile["parts"]
    assert [c.kernel for c in found].count("library") == 1
