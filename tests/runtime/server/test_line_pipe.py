"""JSON lines over a socket: whole, in order, without ever waiting for the other side."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.errors import ExecutionError
from sitsc.runtime.server.line_pipe import LinePipe

VALUES = st.lists(st.dictionaries(st.text(max_size=5), st.text() | st.integers()), max_size=8)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


def read_all(pipe: LinePipe, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        pipe.wait(5.0)
        found += pipe.receive()
    return found


@given(VALUES, st.integers(1, 9))
def test_values_arrive_whole_and_in_order(values: list[Any], piece: int):
    """Whatever the pieces in which the bytes come."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pipe = LinePipe(ours)
        data = b"".join(json.dumps(value).encode() + b"\n" for value in values)
        found: list[Any] = []
        for start in range(0, len(data), piece):
            theirs.sendall(data[start : start + piece])
            found += pipe.receive()
        assert found == values


def test_sending_never_waits(ends: tuple[socket.socket, socket.socket]):
    """Far more than a socket holds: kept, and sent when the other side reads."""
    sender, receiver = LinePipe(ends[0]), LinePipe(ends[1])
    values = [{"number": number, "text": "x" * 10_000} for number in range(300)]
    begin = time.monotonic()
    for value in values:
        sender.send(value)
    assert time.monotonic() - begin < 5
    reading = threading.Thread(target=lambda: found.extend(read_all(receiver, len(values))))
    found: list[Any] = []
    reading.start()
    while reading.is_alive():
        sender.wait(0.01)
        sender.flush()
    assert found == values


def test_nothing_came(ends: tuple[socket.socket, socket.socket]):
    assert LinePipe(ends[0]).receive() == []


def test_an_end_that_is_gone_is_an_error(ends: tuple[socket.socket, socket.socket]):
    """After what it has sent was given out, whatever is sent to it meanwhile."""
    pipe = LinePipe(ends[0])
    ends[1].sendall(b'{"last": 1}\n{"ha')
    ends[1].close()
    for _ in range(3):
        pipe.send({"a": 1})
    assert pipe.receive() == [{"last": 1}]
    for _ in range(2):
        with pytest.raises(ExecutionError, match="has ended"):
            pipe.receive()
