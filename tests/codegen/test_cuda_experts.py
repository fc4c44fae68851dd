"""Mixture-of-experts kernels in Triton's interpreter against the torch reference, and compiled."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.cuda_experts import most_tiles, tile
from sitsc.codegen.cuda_templates import instance
from sitsc.codegen.interpreter import Interpreter
from sitsc.core.errors import CompileError
from sitsc.core.hardware import load_target
from tests.experts_checks import Experts, ExpertsCheck
from tests.interpreted import verify

TILE = {"block_t": 16, "block_n": 16, "block_k": 32, "stages": 2}
SIGMOID = {"scoring": "sigmoid", "groups": 4, "group_top": 2, "scaling": 2.5}


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    with Interpreter() as started:
        yield started


CASES = {
    "one token": ExpertsCheck(Experts(5, 2, 48, 24), 1, TILE),
    "odd sizes": ExpertsCheck(Experts(7, 3, 41, 23, residual=False), 9, TILE, idle=4),
    "clamped": ExpertsCheck(
        Experts(6, 2, 40, 33, True, "swiglu_clamped", route={"scoring": "softmax_chosen"}), 5, TILE
    ),
    "groups": ExpertsCheck(Experts(16, 4, 32, 16, route=SIGMOID), 11, TILE, correction=True),
    "groups of one": ExpertsCheck(
        Experts(6, 2, 32, 16, route=SIGMOID | {"groups": 6, "group_top": 3}), 7, TILE
    ),
    "not normalised": ExpertsCheck(
        Experts(3, 1, 32, 16, True, "gelu_tanh", route={"normalise": 0}), 6, TILE
    ),
    "many tokens": ExpertsCheck(Experts(3, 2, 40, 48), 50, TILE, y_dtype="bf16"),
    "one expert": ExpertsCheck(Experts(1, 1, 16, 16), 19, TILE),
}


@pytest.mark.parametrize("check", CASES.values(), ids=CASES.keys())
def test_layers(interpreter: Interpreter, check: ExpertsCheck):
    verify(interpreter, check)


@settings(max_examples=8, deadline=None)
@given(
    experts=st.integers(1, 9),
    top_k=st.integers(1, 4),
    tokens=st.integers(1, 20),
    hidden=st.integers(1, 50),
    inter=st.integers(1, 40),
)
def test_any_shape(
    interpreter: Interpreter, experts: int, top_k: int, tokens: int, hidden: int, inter: int
):
    op = Experts(experts, min(top_k, experts), hidden, inter)
    verify(interpreter, ExpertsCheck(op, tokens, TILE))


@given(counts=st.lists(st.integers(0, 70), min_size=1, max_size=9), block=st.sampled_from([16, 64]))
def test_there_are_never_more_tiles_than_planned(counts: list[int], block: int):
    tiles = sum(-(-count // block) for count in counts)
    assert tiles <= most_tiles(len(counts), 1, sum(counts), block)


MODELS = {
    "qwen3-30b-a3b": {"experts": 128, "top_k": 8, "hidden": 2048, "inter": 768},
    "mixtral": {"experts": 8, "top_k": 2, "hidden": 4096, "inter": 14336},
    "gpt-oss": {"experts": 32, "top_k": 4, "hidden": 2880, "inter": 2880},
}
TARGETS = {80: "a100", 89: "l40s", 90: "h200", 100: "b200"}


@pytest.mark.parametrize("sm", [80, 89, 90, 100, 120])
def test_the_rule_of_every_target_compiles_without_spills(sm: int, tmp_path):
    limits = load_target(TARGETS.get(sm, "l40s")).cuda
    assert limits is not None
    model = MODELS["gpt-oss" if sm in (89, 100) else "qwen3-30b-a3b"]
    sizes = {"experts": model["experts"], "top_k": model["top_k"]}
    sources, pdl = [], sm >= 90
    for tokens in (1, 32, 2048):
        for glu in (True, False):
            names = ("inter", "hidden") if glu else ("hidden", "inter")
            shape = {"rows": model[names[0]], "columns": model[names[1]], "tokens": tokens}
            shape |= sizes | {"glu": glu}
            chosen = tile(shape, limits.num_sms, limits.shared_bytes)
            sources.append(instance("moe_linear", pdl=pdl, **shape, **chosen))
    sources.append(instance("moe_route", pdl=pdl, **sizes))
    sources.append(instance("moe_sort", pdl=pdl, **sizes))
    sources.append(instance("moe_sum", columns=model["hidden"], top_k=model["top_k"], pdl=pdl))
    metas = compile_kernels(list(dict.fromkeys(sources)), sm, tmp_path)
    assert all(meta.spill_bytes == 0 for meta in metas)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [1, 8, 64, 256, 8192])
def test_the_rule_gives_all_multiprocessors_work(model: str, tokens: int):
    limits = load_target("h200").cuda
    assert limits is not None
    m = MODELS[model]
    shape = {"rows": m["inter"], "columns": m["hidden"], "tokens": tokens, "glu": True}
    chosen = tile(
        shape | {"experts": m["experts"], "top_k": m["top_k"]}, limits.num_sms, limits.shared_bytes
    )
    active = min(m["experts"], tokens * m["top_k"])
    assert -(-m["inter"] // chosen["block_n"]) * active >= limits.num_sms


def test_what_is_not_known_is_refused():
    sizes = {"experts": 4, "top_k": 2}
    with pytest.raises(CompileError, match="swish"):
        shape = {"rows": 4, "columns": 4, "tokens": 1, "activation": "swish"}
        instance("moe_linear", **sizes, **shape, **TILE)
    with pytest.raises(CompileError, match="no router 'best'"):
        instance("moe_route", **sizes, scoring="best")
