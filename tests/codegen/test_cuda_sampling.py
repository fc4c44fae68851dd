"""The sampling kernels in Triton's interpreter against the CPU sampler, at tiny odd vocabularies.

At a real vocabulary, and thousands of draws: tests/gpu/test_sampling_gpu.py.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.codegen.cuda_templates import instance
from sitsc.codegen.interpreter import Interpreter
from sitsc.core.errors import CompileError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.sampling_rows import NOT_FINITE, NOTHING_ALLOWED
from tests.sampling_checks import (
    Case,
    DeviceRows,
    cpu_sample,
    distances,
    drawn,
    random_bits,
    survivors,
)

SMALL: dict[str, Any] = {"parts": 3, "bins": 64, "block": 8, "few": 16, "many": 64}


@pytest.fixture(scope="module")
def run():
    with Interpreter() as started:
        yield lambda step: started.launch(step.source, step.grid, *step.arguments)


def logits(rows: int, width: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def drawing(**options: Any) -> SamplingOptions:
    given: dict[str, Any] = {"temperature": 1.0}
    return SamplingOptions(**(given | options))


def check_rows(rows: DeviceRows, scores: torch.Tensor, run) -> list[int]:
    """Greedy rows and errors as on the CPU; candidates of the others as well; draws among them."""
    got, want = rows.sample(scores, run), cpu_sample(rows, scores)
    for index, case in enumerate(rows.cases):
        if case.options.is_greedy or want[index] < 0:
            assert got[index] == want[index], f"row {index}: {case}"
            continue
        ids, drawable = survivors(rows, index)
        kept = rows.kept(index).numpy()
        if case.options.min_p:
            kept = np.intersect1d(kept, ids)  # min_p is no border of the kernel's
        want_ids = np.intersect1d(ids, drawable)
        assert np.array_equal(np.intersect1d(kept, drawable), want_ids), f"row {index}: {case}"
        assert got[index] in want_ids, f"row {index}: {case}"
    return got


GREEDY = [
    Case(SamplingOptions()),
    Case(SamplingOptions(repetition_penalty=1.7), prompt=(0, 4, 30), answer=(36,)),
    Case(SamplingOptions(repetition_penalty=0.3), prompt=(0, 4, 39, 400)),
    Case(SamplingOptions(), allowed=(5, 31, 32, 36, 38)),
    Case(SamplingOptions(min_tokens=2), answer=(1,)),
    Case(SamplingOptions(min_tokens=2), answer=(1, 2)),
    Case(SamplingOptions(repetition_penalty=1.2, min_tokens=9), allowed=(3, 7, 9)),
    Case(SamplingOptions(min_tokens=1), allowed=(7, 9)),
]


@pytest.mark.parametrize("seed", range(3))
def test_greedy_choice_is_that_of_the_cpu(run, seed) -> None:
    rows = DeviceRows(37, GREEDY, width=40, eos_ids=(7, 9, 400), **SMALL)
    scores = logits(len(GREEDY), 40, seed).round(decimals=seed)  # ties: the lowest id
    scores[:, 7] = 9.0
    scores[:, 37:] = 99.0
    got = check_rows(rows, scores, run)
    assert got[7] == NOTHING_ALLOWED and got[5] == 7


DRAWING = [
    Case(drawing(), seed=1),
    Case(drawing(top_k=5), seed=2),
    Case(drawing(top_k=1, top_p=0.5), seed=3),
    Case(drawing(top_p=0.8, temperature=0.7), seed=4),
    Case(drawing(top_p=1e-6), seed=5),
    Case(drawing(min_p=0.2, temperature=2), seed=6),
    Case(drawing(top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.3, min_tokens=3), seed=7),
    Case(drawing(temperature=100.0, top_p=0.6), seed=2**62 + 5),
    Case(drawing(temperature=0.01, top_k=20), seed=0),
    Case(drawing(top_k=4), allowed=(2, 3), seed=9),
]


@pytest.mark.parametrize("vocabulary", [37, 1000])
def test_candidates_are_those_of_the_cpu(run, vocabulary) -> None:
    tile: dict[str, Any] = (
        SMALL if vocabulary < 100 else SMALL | {"bins": 512, "block": 256, "many": 1024}
    )
    rows = DeviceRows(vocabulary, DRAWING, width=vocabulary + 3, eos_ids=(7,), **tile)
    scores = logits(len(DRAWING), vocabulary + 3)
    scores[:, vocabulary:] = 50.0
    scores[3, 11] = -torch.inf
    check_rows(rows, scores, run)


@settings(max_examples=8, deadline=None)
@given(
    options=st.lists(
        st.builds(
            SamplingOptions,
            temperature=st.sampled_from([0.0, 0.05, 1.0, 5.0, 0.7]),
            top_k=st.sampled_from([0, 1, 2, 7, 40, 1000]),
            top_p=st.sampled_from([1.0, 0.95, 0.6, 0.2, 1e-6]),
            min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
            repetition_penalty=st.sampled_from([1.0, 1.2, 0.7]),
            min_tokens=st.sampled_from([0, 5]),
        ),
        min_size=1,
        max_size=4,
    ),
    vocabulary=st.integers(1, 90),
    seed=st.integers(0, 1000),
    ties=st.booleans(),
    masked=st.booleans(),
)
def test_any_options(run, options, vocabulary, seed, ties, masked) -> None:
    allowed = tuple(range(seed % 3, vocabulary, 2)) if masked else None
    cases = [Case(one, prompt=(0, 3, 8), allowed=allowed, seed=seed) for one in options]
    rows = DeviceRows(vocabulary, cases, eos_ids=(0,), **dict[str, Any](SMALL | {"many": 128}))
    scores = logits(len(cases), vocabulary, seed)
    check_rows(rows, scores.round() if ties else scores, run)


@pytest.mark.parametrize("cases", [GREEDY, DRAWING, [GREEDY[1], DRAWING[3]] * 2])
def test_a_rows_inputs_move_on_once(run, cases) -> None:
    """Where its id is found, by whichever kernel; an idle row's stay as they are."""
    ends: dict[str, Any] = {name: {"advance": 1} for name in ("sample_scan", "sample_draw")}
    rows = DeviceRows(37, cases, width=40, eos_ids=(7, 9, 400), **(SMALL | ends))
    scores = logits(len(cases), 40)
    scores[1] = torch.nan
    before = {name: rows.values[f"{name}_ptr"].clone() for name in ("position_ids", "context_lens")}
    ids = torch.tensor(rows.sample(scores, run))
    assert ids[1] == NOT_FINITE
    busy = before["context_lens"] >= 0
    assert 0 < busy.sum() < len(cases)
    want = torch.where(busy, ids.clamp(min=0), -7)
    assert rows.values["token_ids_ptr"].tolist() == want.tolist()
    for name, values in before.items():
        assert (rows.values[f"{name}_ptr"] == values + busy.int()).all()


def test_greedy_rows_need_no_other_kernel(run) -> None:
    rows = DeviceRows(37, GREEDY, width=40, eos_ids=(7, 9, 400), **SMALL)
    scores = logits(len(GREEDY), 40)
    rows.values["logits_ptr"].copy_(scores)
    run(rows.steps(pdl=False)[0])
    assert rows.values["ids_ptr"].tolist() == cpu_sample(rows, scores)
    assert not rows.values["counter_ptr"].any() and not rows.values["state_ptr"].any()


def test_equal_scores(run) -> None:
    """Those equal to the last of top_k stay; of equals, top_p takes the lowest ids."""
    options = [drawing(top_k=2), drawing(top_p=0.4), drawing(top_p=0.75), drawing(top_p=0.2)]
    cases = [Case(one, seed=index) for index, one in enumerate(options)]
    rows = DeviceRows(9, cases, **SMALL)
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0, 0.0, 0.0, 0.0]]).repeat(4, 1)
    scores[1] = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0, -9.0, -9.0, -9.0])
    scores[2:] = -torch.inf
    scores[2, [2, 4, 6, 8]] = 5.0
    scores[3, [0, 2, 4, 6, 8]] = 5.0
    check_rows(rows, scores, run)
    kept = [rows.kept(index).tolist() for index in range(4)]
    assert kept == [[1, 2, 3], [1, 3], [2, 4, 6], [0]]


@pytest.mark.parametrize("flat", [False, True])
def test_more_candidates_than_the_list_holds_are_searched(run, flat) -> None:
    many = [drawing(top_k=11, top_p=0.7), drawing(top_p=0.5, min_p=0.1), drawing()]
    cases = [Case(one, seed=5) for one in many]
    scores = torch.zeros(3, 21) if flat else logits(3, 21)
    tile = dict[str, Any](SMALL | {"few": 1, "many": 2, "bins": 4, "block": 32})
    short = DeviceRows(21, cases, **tile)
    full = DeviceRows(21, cases, **SMALL)
    assert check_rows(short, scores, run) == check_rows(full, scores, run)


def test_neighbours_places_and_tiles_change_nothing(run) -> None:
    scores = logits(len(DRAWING), 37)
    together = DeviceRows(37, DRAWING, eos_ids=(7,), **SMALL).sample(scores, run)
    backwards = DeviceRows(37, DRAWING[::-1], eos_ids=(7,), **SMALL).sample(scores.flip(0), run)
    assert backwards[::-1] == together
    tile: dict[str, Any] = {"parts": 2, "bins": 32, "block": 16, "few": 32, "many": 64}
    for index in (0, 3, 6):
        one = DeviceRows(37, DRAWING[index : index + 1], eos_ids=(7,), **tile)
        assert one.sample(scores[index : index + 1], run) == together[index : index + 1]


def test_steps_go_on_without_the_host(run) -> None:
    """Seen ids, the draws and the wait for end of text are what new rows at each step would be."""
    first = [
        Case(drawing(repetition_penalty=5.0, min_tokens=2), seed=11),
        Case(SamplingOptions(repetition_penalty=5.0, min_tokens=2)),
        Case(SamplingOptions()),
    ]
    rows = DeviceRows(37, first, eos_ids=(7,), **SMALL)
    cases = first
    for step in range(4):
        scores = logits(3, 37, seed=step)
        scores[:, 7] = 12.0
        got = rows.sample(scores, run)
        fresh = DeviceRows(37, cases, eos_ids=(7,), **SMALL)
        assert fresh.sample(scores, run) == got
        assert (got[1] == 7) == (got[0] == 7) == (step == 2) or step > 2
        pairs = zip(cases, got, strict=True)
        cases = [replace(case, answer=(*case.answer, token)) for case, token in pairs]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), "overflow"])
def test_errors_take_the_place_of_the_id(run, bad) -> None:
    cases = [
        Case(SamplingOptions()),
        Case(drawing()),
        Case(drawing(), allowed=(1, 2)),
        Case(drawing()),
    ]
    if bad == "overflow":
        options = SamplingOptions(repetition_penalty=1e-3)
        cases[:2] = [Case(options), Case(replace(options, temperature=1.0))]
    rows = DeviceRows(37, cases, **SMALL)
    scores = logits(4, 37)
    if bad == "overflow":
        scores[:2, 5] = 3e38
    else:
        scores[:3, slice(None) if bad == -float("inf") else 5] = bad
    before = {name: rows.values[f"{name}_ptr"].clone() for name in ("step", "seen")}
    got = check_rows(rows, scores, run)
    assert got[:2] == [NOT_FINITE] * 2 and got[3] >= 0
    assert torch.equal(rows.values["step_ptr"][:2], before["step"][:2])
    assert torch.equal(rows.values["seen_ptr"], before["seen"])


def test_draws_are_where_the_random_bits_point(run) -> None:
    """Among the CPU sampler's candidates, in the order of their scores."""
    rows = DeviceRows(37, DRAWING, eos_ids=(7,), **SMALL)
    shift = int(rows.sources(pdl=False)[3].constants["SHIFT"])
    for step in range(2):
        scores = logits(len(DRAWING), 37, seed=step)
        rows.values["logits_ptr"].copy_(scores)
        want = []
        for index, case in enumerate(rows.cases):
            ids, _ = survivors(rows, index)
            distance = distances(rows, index)[0][ids]
            want.append(drawn(ids, distance, shift, random_bits(case.seed, len(case.answer))))
        assert rows.sample(scores, run) == want
        pairs = zip(rows.cases, want, strict=True)
        rows.cases = [replace(case, answer=(*case.answer, token)) for case, token in pairs]


@pytest.mark.parametrize("by_step", [False, True])
def test_such_draws_follow_the_probabilities(by_step) -> None:
    """Chi-square over 20000 seeds, or steps of one seed; with 4 degrees 1 in 1000 is above 18.5."""
    scores = np.array([0.0, 1.0, 2.0, -1.0, 0.5], dtype=np.float32)
    distance, ids, num = scores.max() - scores, np.arange(5), 20_000
    places = [(7, n) if by_step else (n, 3) for n in range(num)]
    found = [drawn(ids, distance, 45, random_bits(*place)) for place in places]
    expected = np.exp(-distance) / np.exp(-distance).sum() * num
    assert ((np.bincount(found, minlength=5) - expected) ** 2 / expected).sum() < 18.5


def test_a_vocabulary_larger_than_the_logits_is_refused() -> None:
    with pytest.raises(CompileError, match="do not fit"):
        instance("sample_scan", vocabulary=40, width=37)
