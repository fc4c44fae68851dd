"""CUDA kernels at tiny odd shapes in Triton's interpreter, against the torch references.

Dependent launch is not known there: kernels are rendered without it. At real shapes and with it:
tests/gpu/test_kernels_gpu.py.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.interpreter import Interpreter
from tests.attention_checks import DecodeCheck, RaggedCheck
from tests.interpreted import verify
from tests.kernel_checks import (
    AdvanceCheck,
    GatherCheck,
    GluCheck,
    LinearCheck,
    PlaceCheck,
    RmsNormCheck,
    RopeTableCheck,
    SpreadNormCheck,
)

EPS = 1e-5


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as started:
        yield started


GEMV = [
    (Linear(33, 48), 1, {"block_n": 2, "block_k": 64}, 5),
    (Linear(33, 48, bias=True, out_dtype="fp32"), 2, {"block_n": 4, "block_k": 16}, 0),
    (Linear(33, 64, True, EPS, 0.0, "glu"), 2, {"block_n": 4, "block_k": 16, "depth": 2}, 5),
    (Linear(33, 64, True, EPS, 1.0, "residual"), 3, {"block_n": 2, "block_k": 64}, 4),
    (Linear(33, 96, epilogue="residual"), 3, {"block_n": 2, "block_k": 32, "split": 3}, 4),
    (Linear(37, 48, epilogue="glu"), 1, {"block_n": 1, "block_k": 16, "split": 2}, 1),
    (Linear(33, 64, True, EPS, 0.0, "glu", "relu", True), 4, {"block_n": 2, "block_k": 64}, 3),
    (Linear(33, 64, True, EPS, x_dtype="fp32"), 2, {"block_n": 2, "block_k": 64}, 3),
    (Linear(33, 48, epilogue="residual", out_dtype="fp32"), 2, {"block_n": 4, "block_k": 64}, 3),
]


@pytest.mark.parametrize("stages", [0, 3])
@pytest.mark.parametrize("case", GEMV, ids=lambda case: f"{case[0].epilogue}-{case[1]}")
def test_gemv(interpreter, case, stages):
    op, tokens, tile, programs = case
    verify(interpreter, LinearCheck("gemv", op, tokens, tile | {"stages": stages}, programs))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("case", [case for case in GEMV if "split" not in case[2]])
def test_gemv_walk(interpreter, case, depth):
    op, tokens, tile, _ = case
    tile = {"block_n": tile["block_n"], "block_k": 32, "depth": depth}
    verify(interpreter, LinearCheck("gemv_walk", op, tokens, tile))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu_erf", "relu"])
def test_activations(interpreter, activation):
    op = Linear(9, 16, epilogue="glu", activation=activation)
    verify(interpreter, LinearCheck("gemv", op, 1, {"block_n": 2, "block_k": 16}))
    verify(interpreter, GluCheck(3, 33, activation, {"block": 16}))


SPLIT = {"block_n": 32, "block_k": 16, "split": 2}
SKINNY = [
    (Linear(33, 48, out_dtype="fp32"), 3, {"block_n": 16, "block_k": 16}),
    (Linear(33, 48, True, EPS, 0.0, "glu", "gelu_erf", True), 5, {"block_n": 16, "block_k": 32}),
    (Linear(33, 48, True, EPS, 1.0, "residual"), 7, {"block_n": 32, "block_k": 16, "split": 2}),
    (Linear(33, 80, False, 0.0, 0.0, "glu"), 16, {"block_n": 16, "block_k": 16, "split": 4}),
    (Linear(40, 80, True, EPS, 0.0, "glu"), 1, {"block_n": 32, "block_k": 16, "split": 3}),
    (Linear(64, 64, bias=True), 29, {"block_n": 64, "block_k": 64}),
    (Linear(33, 48, True, EPS, 0.0, "glu", x_dtype="fp32"), 5, {"block_n": 16, "block_k": 16}),
    (Linear(33, 48, True, EPS, 1.0, "residual", out_dtype="fp32", x_dtype="fp32"), 7, SPLIT),
    (Linear(33, 48, epilogue="residual", out_dtype="fp32"), 3, SPLIT),
]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("case", SKINNY, ids=lambda case: f"{case[0].epilogue}-{case[1]}")
def test_skinny(interpreter, case, ahead):
    op, tokens, tile = case
    more = {"block_t": 16 if tokens <= 16 else 32, "stages": 2, "ahead": ahead}
    verify(interpreter, LinearCheck("skinny", op, tokens, tile | more))


@pytest.mark.parametrize("template", ["gemv", "skinny"])
@pytest.mark.parametrize("split", [1, 2])
def test_y_may_be_the_residual(interpreter, template, split):
    tiles = {"gemv": {"block_n": 4}, "skinny": {"block_n": 16, "block_t": 16, "stages": 2}}
    tile = tiles[template] | {"block_k": 32, "split": split}
    op = Linear(33, 64, epilogue="residual")
    verify(interpreter, LinearCheck(template, op, 3, tile, in_place=True))


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    tokens=st.integers(1, 4),
    split=st.integers(1, 3),
    programs=st.integers(0, 9),
    glu=st.booleans(),
)
def test_any_shape(interpreter, rows, columns, tokens, split, programs, glu):
    op = Linear(rows, columns, epilogue="glu" if glu else "residual")
    tile = {"block_n": 4, "block_k": 16, "split": split}
    verify(interpreter, LinearCheck("gemv", op, tokens, tile, programs))
    tile = {"block_n": 16, "block_k": 16, "block_t": 16, "split": split, "stages": 2}
    verify(interpreter, LinearCheck("skinny", op, tokens, tile))


@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "columns"), [(1, 48), (3, 33), (2, 64)])
def test_rms_norm(interpreter, rows, columns, offset, parts):
    verify(interpreter, RmsNormCheck(rows, columns, parts, offset))


def test_rms_norm_without_a_weight(interpreter):
    verify(interpreter, RmsNormCheck(3, 40, weight=False))


@pytest.mark.parametrize(("parts", "dtype"), [(0, "fp32"), (4, "fp32"), (1, "bf16")])
def test_rms_norm_of_float32(interpreter, parts, dtype):
    verify(interpreter, RmsNormCheck(3, 33, parts, x_dtype="fp32", parts_dtype=dtype))


SPREAD = [
    (Linear(33, 48, True, EPS, 0.0, "glu", "gelu_erf", x_dtype="fp32"), 5, {}, 2),
    (Linear(33, 48, True, EPS, 1.0, x_dtype="fp32"), 7, {"block_n": 32, "split": 2}, 2),
    (Linear(33, 80, True, EPS, 0.0, "parts", out_dtype="fp32"), 9, {"split": 4}, 0),
    (Linear(40, 50, True, EPS, 1.0, out_dtype="fp32"), 1, {}, 0),
]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("case", SPREAD, ids=lambda case: f"{case[0].epilogue}-{case[1]}")
def test_norm_that_programs_share(interpreter, case, ahead):
    op, tokens, tile, parts = case
    tile = {"block_t": 16, "block_n": 16, "block_k": 16, "stages": 2, "ahead": ahead} | tile
    blocks = 8 if op.columns == 80 else 4
    verify(interpreter, SpreadNormCheck(op, tokens, tile, blocks, parts))


@pytest.mark.parametrize(
    ("template", "tile"),
    [
        ("gemv", {"block_n": 4, "block_k": 64, "depth": 1}),
        ("gemv", {"block_n": 4, "block_k": 32, "split": 2}),
        ("gemv", {"block_n": 4, "block_k": 64, "stages": 2}),
        ("gemv_walk", {"block_n": 4, "block_k": 16, "depth": 1}),
    ],
)
def test_norm_that_programs_share_before_few_tokens(interpreter, template, tile):
    op = Linear(33, 48, True, EPS, 1.0, "glu", "gelu_erf", x_dtype="fp32")
    verify(interpreter, SpreadNormCheck(op, 2, {"tokens": 2} | tile, 8, 2, template))


@pytest.mark.parametrize("scale", [1.0, 6.928203])
def test_gather(interpreter, scale):
    verify(interpreter, GatherCheck(5, 33, 48, scale, {"block": 32}))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_rope_table(interpreter, style, out_dtype):
    positions = (0, 1, 77, 4095, 131071, 5, 6)
    verify(interpreter, RopeTableCheck(positions, 20, style, 1.25, out_dtype))


def test_advance(interpreter):
    verify(interpreter, AdvanceCheck((0, 17, -1, 4, -1), 8))


def test_place(interpreter):
    verify(interpreter, PlaceCheck(5, 23))


def heads(**changes: Any) -> Heads:
    given: dict[str, Any] = {
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 16,
        "page_tokens": 4,
        "scale": 0.25,
    }
    return Heads(**(given | changes))


HEADS = {
    "gqa": heads(),
    "one head": heads(heads=1, kv_heads=1, head_dim=20),
    "partial rope": heads(head_dim=20, rotary_dim=8, angle_dtype="fp32"),
    "interleaved": heads(rope="interleaved", rotary_dim=12),
    "no rope": heads(heads=2, rope="none", head_dim=32),
    "window": heads(window=5),
    "soft cap": heads(softcap=3.0, scale=1.5),
    "sinks": heads(sinks=True, window=9),
    "large pages": heads(heads=2, kv_heads=1, head_dim=64, page_tokens=32),
}
LENGTHS = (0, 16, 37, -1, 75)
MIXED = ((0, 7), (21, 1), (13, 11), (0, 1), (3, 0), (0, 0))


@pytest.mark.parametrize("op", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize(
    ("splits", "merge", "share"), [(1, "none", 1), (3, "reduce", 1), (3, "last", 1), (9, "last", 2)]
)
def test_attention_decode(interpreter, op, splits, merge, share):
    tile = {"block": 16, "stages": 2}
    verify(interpreter, DecodeCheck(op, LENGTHS, tile, splits, merge, share, block_d=16))


@pytest.mark.parametrize("op", HEADS.values(), ids=HEADS.keys())
def test_attention_of_a_ragged_batch(interpreter, op):
    tile = {"block_m": 16, "block_n": 16, "stages": 2}
    verify(interpreter, RaggedCheck(op, MIXED, tile, padding=2, max_sequences=8))


def test_rotated_queries_may_go_to_a_buffer_of_their_own(interpreter):
    tile = {"block_m": 32, "block_n": 16, "stages": 1}
    check = RaggedCheck(heads(), ((2, 19),), tile, in_place=False, max_sequences=2)
    verify(interpreter, check)
