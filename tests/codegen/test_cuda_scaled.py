"""Residual sums scaled for the next norm, and columns folded, in Triton's interpreter.

On a GPU at real shapes: tests/gpu/kernel_cases.py.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.codegen.cuda_linear import Linear, gemv, gemv_walk, skinny, wide
from sitsc.codegen.interpreter import Interpreter
from sitsc.core.errors import CompileError
from tests.interpreted import verify
from tests.kernel_checks import LinearCheck, Tile
from tests.scaled_checks import ScaledCheck, ScaledGatherCheck

EPS = 1e-5
SUM = Linear(33, 64, epilogue="residual", out_dtype="fp32")
NORMED = Linear(20, 33, True, EPS, x_dtype="fp32")
SKINNY: Tile = {"block_n": 16, "block_k": 16, "block_t": 16, "stages": 2}
GEMV: Tile = {"block_n": 2, "block_k": 64}
WALK: Tile = {"block_n": 4, "block_k": 32}

WRONG = (("fold", 3), ("split", 4), ("fold", 8))


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as started:
        yield started


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("fold", [1, 2])
def test_skinny(interpreter, fold, ahead, offset, in_place):
    second = replace(NORMED, offset=offset, epilogue="glu")
    tile = SKINNY | {"ahead": ahead, "fold": fold}
    check = ScaledCheck(SUM, second, 5, tile, SKINNY | {"ahead": ahead}, in_place=in_place)
    verify(interpreter, check)


@pytest.mark.parametrize("stages", [0, 3])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("programs", [0, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gemv(interpreter, dtype, programs, tokens, stages):
    """Programs that walk several groups of rows sum the squares of all of them."""
    first = replace(SUM, out_dtype=dtype, bias=False)
    second = replace(NORMED, x_dtype=dtype, offset=1.0)
    tile = GEMV | {"stages": stages}
    pair = ("gemv", "gemv")
    verify(interpreter, ScaledCheck(first, second, tokens, tile, tile, pair, programs))


@pytest.mark.parametrize("pair", [("gemv_walk", "gemv"), ("gemv", "gemv_walk")])
def test_gemv_walk(interpreter, pair):
    one, two = (WALK if name == "gemv_walk" else GEMV for name in pair)
    verify(interpreter, ScaledCheck(SUM, NORMED, 2, one, two, pair, 3))


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 90),
    count=st.integers(2, 40),
    block=st.sampled_from([8, 32, 1024]),
    scaling=st.sampled_from([(1.0, 0.0), (48.0, 1.0)]),
    dtype=st.sampled_from(["bf16", "fp32"]),
)
def test_embeddings(interpreter, rows, columns, count, block, scaling, dtype):
    """However many programs share a row, all sums of squares are written, each square in one."""
    scale, offset = scaling
    check = ScaledGatherCheck(rows, columns, count, scale, offset, dtype, {"block": block})
    verify(interpreter, check)


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 40),
    blocks=st.integers(1, 3),
    fold=st.sampled_from([1, 2, 4]),
    tokens=st.integers(1, 16),
    split=st.integers(1, 2),
    epilogue=st.sampled_from(["store", "residual", "glu"]),
    ahead=st.booleans(),
)
def test_any_shape_can_be_folded(interpreter, rows, blocks, fold, tokens, split, epilogue, ahead):
    op = Linear(rows, blocks * fold * split * 16, epilogue=epilogue, bias=epilogue == "store")
    tile = SKINNY | {"split": split, "fold": fold, "ahead": ahead}
    verify(interpreter, LinearCheck("skinny", op, tokens, tile))


def test_what_cannot_be_scaled_or_folded():
    scaled = replace(SUM, scaled=3)
    with pytest.raises(CompileError, match="only residual sums"):
        skinny(replace(NORMED, scaled=3), **SKINNY)
    with pytest.raises(CompileError, match="when they are whole"):
        skinny(scaled, **SKINNY, split=2)
    with pytest.raises(CompileError, match="needs all columns"):
        gemv(scaled, tokens=1, block_n=2, block_k=16, split=2)
    with pytest.raises(CompileError, match="rows for a norm"):
        wide(scaled, tokens=16, block_t=64, block_n=64, stages=3)
    with pytest.raises(CompileError, match="or inside"):
        gemv_walk(replace(NORMED, squares=4), tokens=1, **WALK)
    two: Tile = SKINNY | {"fold": 2}
    wrong: list[Tile] = [two | {name: value} for name, value in WRONG]
    for op, tile in ((NORMED, two), *((SUM, tile) for tile in wrong)):
        with pytest.raises(CompileError, match="cannot be folded"):
            skinny(op, **tile)
    with pytest.raises(CompileError, match="cannot be folded"):
        skinny(SUM, **SKINNY, fold=2, prefetch_bytes=1024)
