"""Steps one after another as messages: what is read is what was written, and repeats are short."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.errors import ExecutionError
from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.core.serving.step_stream import StepReader, StepWriter
from sitsc.core.serving.wire import encode

TOKENS = st.integers(UNKNOWN, 1 << 20)
PAGES = st.integers(0, 1 << 20)
Draw = Callable[[st.SearchStrategy[Any]], Any]


def fresh(draw: Draw, first_id: int) -> StepBatch:
    """A step of requests that no step before had."""
    decoding = draw(st.booleans())
    counts = draw(st.lists(st.integers(1, 1 if decoding else 4), min_size=1, max_size=4))
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return StepBatch(
        "decode" if decoding else "prefill",
        tuple(range(first_id, first_id + len(counts))),
        [draw(TOKENS) for _ in range(starts[-1])],
        starts,
        [draw(st.integers(0, 99)) for _ in counts],
        [draw(st.lists(PAGES, min_size=1, max_size=3)) for _ in counts],
        [decoding or draw(st.booleans()) for _ in counts],
    )


def following(draw: Draw, last: StepBatch) -> StepBatch:
    """The next token of the same requests; some get a page, in the page pool's own lists."""
    for table in last.block_tables:
        table += draw(st.lists(PAGES, max_size=1))
    return StepBatch(
        "decode",
        last.request_ids,
        [draw(TOKENS) for _ in last.request_ids],
        list(range(last.num_seqs + 1)),
        [
            length + end - start
            for length, start, end in zip(
                last.context_lens, last.query_start, last.query_start[1:], strict=False
            )
        ],
        last.block_tables,
        [True] * last.num_seqs,
    )


@given(data=st.data())
def test_every_step_of_a_run_is_read_as_it_was_written(data: st.DataObject) -> None:
    writer, reader, last, ids = StepWriter(), StepReader(), None, 0
    for _ in range(data.draw(st.integers(1, 6))):
        before = last
        again = last is not None and data.draw(st.booleans())
        step = following(data.draw, last) if again and last else fresh(data.draw, ids)
        ids += step.num_seqs
        message = writer.message(step)
        assert reader.step(message) == copy.deepcopy(step)
        if again and before is not None and before.regime == "decode":
            assert len(message) <= 2 + 3 * step.num_seqs < len(encode(step))
        last = step


def decoding() -> StepBatch:
    return StepBatch("decode", (7, 8), [1, 2], [0, 1, 2], [5, 9], [[3], [4]], [True, True])


def test_other_requests_or_lengths_are_told_in_full() -> None:
    writer = StepWriter()
    assert writer.message(decoding()) == encode(decoding())
    changed = decoding()
    changed.context_lens[0] += 1  # the other has not grown
    assert writer.message(changed) == encode(changed)
    other = StepBatch("decode", (7, 9), [1, 2], [0, 1, 2], [7, 10], [[3], [4]], [True, True])
    assert writer.message(other) == encode(other)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ([], "no step"),
        ([-2], "does not follow"),
        ([-2, 1, 5], "does not follow"),
        ([-2, 2, 5], "another length"),
        ([-2, 2, 5, 6, 0], "another length"),
        ([-2, 2, 5, 6, 2, 11], "no row 2"),
        ([-2, 2, 5, 6, -1, 11], "no row -1"),
    ],
)
def test_a_damaged_message_is_refused(message: list[int], why: str) -> None:
    reader = StepReader()
    reader.step(encode(decoding()))
    with pytest.raises(ExecutionError, match=why):
        reader.step(message)


def test_a_short_message_cannot_be_the_first() -> None:
    with pytest.raises(ExecutionError, match="does not follow"):
        StepReader().step([-2, 2, 5, 6])


@given(batch_at=st.integers(0, 20), value=st.integers(-9, 9))
def test_a_changed_number_gives_a_step_or_an_error(batch_at: int, value: int) -> None:
    numbers = encode(decoding())
    numbers[min(batch_at, len(numbers) - 1)] = value
    try:
        step = StepReader().step(numbers)
    except ExecutionError:
        return
    assert len(step.block_tables) == len(step.context_lens) == step.num_seqs
