"""Steps as numbers: what arrives is what was sent, and anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.errors import ExecutionError
from sitsc.core.serving.batch import StepBatch
from sitsc.core.serving.wire import decode, encode

NUMBERS = st.integers(0, 1 << 40)


@st.composite
def batches(draw: st.DrawFn) -> StepBatch:
    counts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    each = st.lists(NUMBERS, min_size=len(counts), max_size=len(counts))
    return StepBatch(
        draw(st.sampled_from(["decode", "prefill"])),
        tuple(draw(each)),
        draw(st.lists(NUMBERS, min_size=starts[-1], max_size=starts[-1])),
        starts,
        draw(each),
        [draw(st.lists(NUMBERS, min_size=1, max_size=4)) for _ in counts],
        draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts))),
    )


@given(batch=batches())
def test_round_trip(batch: StepBatch):
    assert decode(encode(batch)) == batch


@given(batch=batches(), cut=st.integers(1, 8))
def test_a_message_of_another_length_is_refused(batch: StepBatch, cut: int):
    numbers = encode(batch)
    for wrong in (numbers[:-cut], [*numbers, 0], [9, *numbers[1:]], []):
        with pytest.raises(ExecutionError):
            decode(wrong)
