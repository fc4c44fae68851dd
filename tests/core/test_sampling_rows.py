"""Rows on the device from options: what they hold, when they are plain, bitmaps, errors."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving import sampling_rows
from sitsc.core.serving.sampling_rows import SamplingRow, request_seed, sampling_row


def row(options: SamplingOptions, **rest) -> SamplingRow:
    given: dict[str, Any] = {"seed": 1, "num_generated": 0, "vocabulary": 100}
    return sampling_row(options, **(given | rest))


def test_fields_are_the_options() -> None:
    options = SamplingOptions(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.2, min_tokens=5
    )
    assert row(options, num_generated=3, slot=4, has_mask=True) == SamplingRow(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        penalty=1.2,
        seed=1,
        step=3,
        suppress=2,
        has_mask=1,
        slot=4,
    )
    assert row(options, num_generated=9).suppress == 0
    assert row(SamplingOptions(top_k=100)).top_k == row(SamplingOptions(top_k=2**40)).top_k == 0
    assert row(SamplingOptions(min_tokens=2**40, max_tokens=2**40)).suppress == 2**31 - 1


@pytest.mark.parametrize(
    ("options", "rest", "plain", "seen"),
    [
        (SamplingOptions(), {}, True, False),
        (SamplingOptions(top_k=4, top_p=0.5), {}, True, False),  # filters keep the best
        (SamplingOptions(repetition_penalty=1 + 1e-9), {}, True, False),  # 1 in fp32
        (SamplingOptions(repetition_penalty=1.1), {}, False, True),
        (SamplingOptions(min_tokens=2), {}, False, False),
        (SamplingOptions(min_tokens=2), {"num_generated": 2}, True, False),
        (SamplingOptions(), {"has_mask": True}, False, False),
        (SamplingOptions(temperature=1), {}, False, False),
    ],
)
def test_plain_rows(options, rest, plain, seen) -> None:
    made = row(options, **rest)
    assert (made.is_plain, made.needs_seen) == (plain, seen)


def test_an_idle_row_is_plain() -> None:
    assert SamplingRow().is_plain


def test_seeds() -> None:
    assert request_seed(SamplingOptions(seed=0)) == 0
    assert request_seed(SamplingOptions(seed=2**63 - 1)) == 2**63 - 1
    fresh = {request_seed(SamplingOptions()) for _ in range(8)}
    assert len(fresh) > 1 and all(0 <= seed < 2**63 for seed in fresh)


@given(st.integers(1, 200), st.sets(st.integers(0, 250)))
def test_bitmaps(vocabulary, ids) -> None:
    words = sampling_rows.bitmap_of_ids(ids, vocabulary)
    assert words.dtype == np.int32 and len(words) == sampling_rows.bitmap_words(vocabulary)
    found = {id for id in range(len(words) * 32) if int(words[id // 32]) >> (id % 32) & 1}
    assert found == {id for id in ids if id < vocabulary}


def test_ids_below_zero_are_errors() -> None:
    assert sampling_rows.sampling_error(0) is None
    assert "no token is allowed" in str(sampling_rows.sampling_error(-1))
    assert "not finite" in str(sampling_rows.sampling_error(-2))
