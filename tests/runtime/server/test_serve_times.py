"""What counts as a measurement while serving, and what does not."""

import pytest

from sitsc.core.actual import TPOT, TTFT
from sitsc.runtime.engine import Output
from sitsc.runtime.server.serve_times import FEWEST_PROMPTS, FEWEST_STEPS, ServeTimes

FOREVER = 10**6


class Server:
    """Requests that decode together, on a clock of ours."""

    def __init__(self) -> None:
        self.times = ServeTimes()
        self.now = 0.0
        self.running: list[int] = []

    def ask(self, request: int, tokens: int) -> None:
        self.times.asked(request, tokens, self.now)
        self.running.append(request)

    def step(self, seconds: float, *ids: int, last: tuple[int, ...] = ()) -> None:
        self.now += seconds
        outputs = [Output(i, "", (1,), "length" if i in last else None) for i in ids]
        self.running = [request for request in self.running if request not in last]
        self.times.stepped(outputs, len(self.running), self.now)

    def points(self, kind: str) -> list[tuple[int, float, float]]:
        found = [point for point in self.times.points() if point.kind == kind]
        return [(p.sequences or p.tokens, p.context, p.value) for p in found]


@pytest.fixture
def server() -> Server:
    return Server()


def test_steps_of_the_same_requests_are_tpot(server: Server):
    server.ask(0, 100)
    server.ask(1, 50)
    server.step(0.5, 0, 1)  # both prompts
    for _ in range(FEWEST_STEPS + 1):
        server.step(0.01, 0, 1)
    ((sequences, context, ms),) = server.points(TPOT)
    # Their first tokens end prefill; the first step after them has no beginning.
    assert (sequences, ms) == (2, pytest.approx(10.0))
    assert context == pytest.approx(75 + (2 + FEWEST_STEPS + 1) / 2)


def test_too_few_steps_are_no_figure(server: Server):
    server.ask(0, 100)
    for _ in range(FEWEST_STEPS + 1):
        server.step(0.01, 0)
    assert server.points(TPOT) == []


def test_a_prompt_beside_is_not_counted(server: Server):
    server.ask(0, 40)
    server.step(0.1, 0)
    for _ in range(2 * FEWEST_STEPS):
        server.ask(1, 4000)
        server.step(0.5, 0)  # a part of the prompt is computed in it
        server.step(0.5, 0, 1, last=(1,))
    assert server.points(TPOT) == []


def test_an_ended_request_begins_anew(server: Server):
    server.ask(0, 140)
    server.ask(1, 140)
    server.step(0.1, 0, 1)
    for _ in range(FEWEST_STEPS):
        server.step(0.02, 0, 1)
    server.step(0.02, 0, 1, last=(1,))
    server.step(7.0, 0)  # not a time between two steps of the same
    for _ in range(FEWEST_STEPS):
        server.step(0.01, 0)
    assert [(n, ms) for n, _, ms in server.points(TPOT)] == [(1, pytest.approx(10.0))]


def test_micro_batches_take_turns(server: Server):
    """Each of the two has a token in every second step: TPOT is the time of two."""
    for request in range(4):
        server.ask(request, 64)
    server.step(0.1, 0, 1)
    server.step(0.1, 2, 3)
    for _ in range(FEWEST_STEPS):
        server.step(0.004, 0, 1)
        server.step(0.006, 2, 3)
    ((sequences, _, ms),) = server.points(TPOT)
    assert (sequences, ms) == (4, pytest.approx(10.0))


def test_a_lone_prompt_is_ttft(server: Server):
    for request, seconds in enumerate((0.3, 0.1, 0.2)):
        server.ask(request, 500)
        server.step(seconds, request, last=(request,))
    assert server.points(TTFT) == [(500, 0.0, pytest.approx(200.0))]


@pytest.mark.parametrize("first", [True, False])
def test_a_prompt_beside_another_is_not(server: Server, first: bool):
    """Neither the one that came before nor the one after."""
    for number in range(FEWEST_PROMPTS):
        pair = (2 * number, 2 * number + 1)
        for request in pair if first else reversed(pair):
            server.ask(request, 500)
        server.step(0.1, *pair, last=pair)
    assert server.points(TTFT) == []


def test_lengths_that_are_close_are_one_figure(server: Server):
    """The time and the length of one and the same request."""
    lengths = (500, 505, 510, 505, 500)
    for request, tokens in enumerate(lengths):
        server.ask(request, tokens)
        server.step(tokens / 1000 + request / 1e6, request, last=(request,))
    ((tokens, _, ms),) = server.points(TTFT)
    assert ms == pytest.approx(tokens, abs=0.01)


def test_memory_is_bounded(server: Server):
    server.ask(0, 40)
    for _ in range(20_000):
        server.step(0.001, 0)
    kept = sum(map(len, server.times._steps.values()))
    assert kept < 12 * 1024 and len(server.points(TPOT)) < 12


def test_outputs_of_others_do_not_matter(server: Server):
    """The engine's own first token, before anything is served."""
    server.times.stepped([Output(77, "", (1,), "length")], 0, 0.0)
    assert server.times.points() == ()
