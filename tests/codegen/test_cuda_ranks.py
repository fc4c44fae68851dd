"""Kernels between ranks: at real sizes as machine code without a GPU, and what they refuse."""

from dataclasses import replace
from pathlib import Path

import pytest

from sitsc.codegen import cuda_ranks
from sitsc.codegen.aot import compile_kernels
from sitsc.codegen.aot_kernel import compile_unchecked
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError

COLUMNS, RANKS = (64, 576, 2880, 4096, 8192), (2, 4, 8)
# As the planner asks for them: few rows in fp32, shared by programs or not, and many in bfloat16.
FORMS = (
    {"payload": "fp32", "blocks": 8},
    {"payload": "fp32", "blocks": 1},
    {"payload": "bf16", "blocks": 1, "many": True},
)
FAST = [(90, 2), (90, 8)]


def sums(ranks: int, pdl: bool) -> list[KernelSource]:
    """All sums over so many ranks. The planner gives no program more than 8192 vectors."""
    return [
        cuda_ranks.all_reduce(ranks=ranks, columns=columns, pdl=pdl, **form)
        for columns in COLUMNS
        for form in FORMS
        if ranks * columns <= 4 * 8192 or form["payload"] == "bf16" or form["blocks"] > 1
    ]


def others(ranks: int, pdl: bool) -> list[KernelSource]:
    """Gathers, sampled ids, and crossings of odd and even rows."""
    return [
        cuda_ranks.all_gather(ranks=ranks, inner_bytes=64128 * 4 // ranks, pdl=pdl),
        cuda_ranks.share_ids(ranks=ranks, pdl=pdl),
        cuda_ranks.send_ids(slots=ranks + 2, rows=256, pdl=pdl),
        cuda_ranks.place_sent(slots=ranks + 2, rows=256, pdl=pdl),
        *(
            make(inner_bytes=n, pdl=pdl)
            for make in (cuda_ranks.send, cuda_ranks.receive)
            for n in (72, 8192)
        ),
        cuda_ranks.all_reduce(ranks=ranks, columns=1, norm=False, pdl=pdl),
    ]


@pytest.mark.parametrize(
    ("sm", "ranks"),
    [
        pytest.param(sm, n, marks=() if (sm, n) in FAST else pytest.mark.slow)
        for sm in (80, 90, 100, 120)
        for n in RANKS
    ],
)
def test_nothing_spills(sm: int, ranks: int, tmp_path: Path):
    sources = sums(ranks, sm >= 90) + others(ranks, sm >= 90)
    metas = compile_kernels(sources, sm, tmp_path, jobs=1)  # refuses what does
    assert [meta.key for meta in metas] == [source.key() for source in sources]


def test_rows_that_are_no_whole_vectors_are_taken_together():
    odd = cuda_ranks.all_reduce(ranks=2, columns=36, norm=False)
    assert odd.constants["H"] == 72
    assert cuda_ranks.all_reduce(ranks=2, columns=1, norm=False).constants["H"] == 8
    assert cuda_ranks.send(inner_bytes=72).constants["INNER"] == 144
    assert cuda_ranks.receive(inner_bytes=16).constants["INNER"] == 16


def test_words_that_a_compiler_would_read_twice_are_refused():
    """With two ids to a thread Triton reads every slot in two layouts: one resets what the other
    still waits for."""
    twice = replace(cuda_ranks.share_ids(ranks=2), num_warps=4)
    with pytest.raises(CompileError, match="2 exchanges of words between ranks out of 1"):
        compile_unchecked(twice, 90)
    for most in (1, 256, 5000):
        once = cuda_ranks.share_ids(ranks=2, max_sequences=most)
        assert once.constants["BLOCK"] == 32 * once.num_warps


def test_errors_name_what_cannot_be():
    with pytest.raises(CompileError, match="36 elements"):
        cuda_ranks.all_reduce(ranks=2, columns=36)
    with pytest.raises(CompileError, match="36 elements"):
        cuda_ranks.all_reduce(ranks=2, columns=36, norm=False, parts=2)
    with pytest.raises(CompileError, match="bfloat16 travel as bfloat16"):
        cuda_ranks.all_reduce(ranks=2, columns=64, parts_dtype="bf16", payload="fp32")
    with pytest.raises(CompileError, match="72 bytes cannot be gathered"):
        cuda_ranks.all_gather(ranks=2, inner_bytes=72)
