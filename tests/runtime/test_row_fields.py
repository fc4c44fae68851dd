"""Fields of sampled rows as a message: the same copies on the other side, or an error."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.errors import ExecutionError
from sitsc.core.options import CompileOptions
from sitsc.core.plan import ArenaBuffer, Tokens
from sitsc.passes.cuda_step import step_buffers
from sitsc.runtime.row_fields import FIELDS, RecordedFields, read_fields

BATCH, VOCABULARY = 4, 70


@dataclass(frozen=True)
class _Memory:
    arena: tuple[ArenaBuffer, ...]


@dataclass(frozen=True)
class _Planned:
    memory: _Memory


def planned() -> Any:
    """What of a plan counts: buffers of a step as the planner makes them."""
    tokens = Tokens(VOCABULARY, VOCABULARY, 0, False, (), 64)
    options = CompileOptions(target="h200", max_batch=BATCH, max_context=64)
    return _Planned(_Memory(tuple(step_buffers(options, 64, tokens))))


PLAN = planned()
COPIES = st.lists(
    st.tuples(
        st.sampled_from(FIELDS), st.integers(0, BATCH - 1), st.lists(st.integers(0, 99), max_size=4)
    ).map(lambda copy: (copy[0], copy[1], copy[2][: BATCH - copy[1]])),
    max_size=5,
)


@given(copies=COPIES)
def test_copies_arrive_in_order_in_the_types_of_their_buffers(copies: list[Any]) -> None:
    recorded, types = RecordedFields(PLAN), {b.name: b.dtype for b in PLAN.memory.arena}
    for name, start, values in copies:
        recorded.put(name, np.array(values, np.float64), start)
    found = list(read_fields(PLAN, recorded.tensor()))
    assert [(name, start, values.tolist()) for name, values, start in found] == copies
    assert all(values.dtype == np.dtype(types[name]) for name, values, _ in found)


def test_nothing_is_an_empty_message() -> None:
    message = RecordedFields(PLAN).tensor()
    assert message.dtype == torch.uint8 and not len(message)
    assert list(read_fields(PLAN, message)) == []


def _message(*head: int, data: bytes = b"") -> torch.Tensor:
    raw = bytearray(np.array(head, np.int64).tobytes() + data)
    return torch.frombuffer(raw, dtype=torch.uint8)


@pytest.mark.parametrize(
    "message",
    [
        _message(0, 0),
        _message(99, 0, 0),
        _message(-1, 0, 0),
        _message(0, 0, 8, data=b"1234"),
        _message(0, 0, -24),
        _message(0, -1, 4, data=b"1234"),
        _message(0, 0, 3, data=b"123"),
        _message(0, BATCH, 4, data=b"1234"),
    ],
    ids=["cut", "no field", "negative", "short", "backwards", "before", "part", "past the end"],
)
def test_a_damaged_message_is_refused(message: torch.Tensor) -> None:
    with pytest.raises(ExecutionError, match="fields of rows"):
        list(read_fields(PLAN, message))
