"""The engine's side of the server, asked over its pipe: answers, refusals, failures, its end."""

import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from sitsc.core.errors import ExecutionError, RankError
from sitsc.core.sampling import SamplingOptions
from sitsc.core.serving.batch import StepBatch
from sitsc.runtime.server.engine_service import EngineService
from sitsc.runtime.server.line_pipe import LinePipe
from tests.runtime.engine_models import (
    PROMPTS,
    TOKENIZER,
    VOCAB,
    AheadExecutor,
    PagedExecutor,
    engine,
    executor,
    is_clean,
    one_thread,  # noqa: F401  (a fixture of every test here)
    plain,
)

IDS = TOKENIZER.encode(PROMPTS[0])
LONG_S = 60


class Front:
    """The other side of a running service."""

    def __init__(
        self, kind: Any, before: Callable[[StepBatch], None] | None = None, drain_s: float = 5.0
    ) -> None:
        self.ours, theirs = socket.socketpair()
        self.pipe = LinePipe(self.ours)
        self.engine = engine(kind=kind)
        if before is not None:
            executor(self.engine).before = before
        self.theirs, self.listening, self.error = theirs, 0, None
        self.service = EngineService(self.engine, LinePipe(theirs), drain_s, self._listens)
        self.texts: dict[int, str] = defaultdict(str)
        self.ends: dict[int, tuple[str, Any]] = {}
        self.counts: dict[int, int] = defaultdict(int)
        self.said: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def ask(self, key: int, ids: list[int], **options: Any) -> None:
        self.pipe.send({"ask": key, "ids": ids, "options": asdict(SamplingOptions(**options))})

    def read(self, *keys: int) -> None:
        """Until these have ended."""
        while not set(keys) <= set(self.ends):
            self.pipe.wait(LONG_S)
            for message in self.pipe.receive():
                self._take(message)

    def end(self) -> BaseException | None:
        self.pipe.send({"bye": True})
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
        return self.error

    def close(self) -> None:
        self.ours.close()
        self._thread.join(LONG_S)
        self.theirs.close()

    def _take(self, message: dict[str, Any]) -> None:
        for key, text, tokens, reason, wrong in message.get("outputs", ()):
            assert key not in self.ends
            self.texts[key] += text
            self.counts[key] += tokens
            if reason is not None:
                self.ends[key] = reason, wrong
        if "outputs" not in message:
            self.said.append(message)

    def _listens(self) -> None:
        self.listening += 1

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:
            self.error = error


@pytest.fixture(params=[PagedExecutor, AheadExecutor])
def front(request: pytest.FixtureRequest) -> Iterator[Front]:
    made = Front(request.param)
    yield made
    made.close()


def test_answers_come_whole(front: Front):
    front.pipe.send({"listening": True})
    for key, prompt in enumerate(PROMPTS):
        front.ask(key, TOKENIZER.encode(prompt), max_tokens=12)
    front.read(*range(len(PROMPTS)))
    for key, prompt in enumerate(PROMPTS):
        assert front.texts[key] == TOKENIZER.decode(plain(prompt, 12))
        assert front.ends[key][1] is None and front.counts[key] == len(plain(prompt, 12))
    assert front.said[0]["ready"] and front.listening == 1
    assert front.end() is None and is_clean(front.engine)


def test_what_is_refused_ends_at_once(front: Front):
    front.ask(5, [VOCAB], max_tokens=3)
    front.ask(6, [], max_tokens=3)
    front.ask(7, IDS, max_tokens=3)
    front.read(5, 6, 7)
    assert [front.ends[key][0] for key in (5, 6)] == ["error", "error"]
    for key in (5, 6):
        what, refused = front.ends[key][1]
        assert refused and what
    assert front.ends[7][1] is None and front.end() is None


def test_aborts_of_any_number_at_any_time(front: Front):
    front.pipe.send({"abort": 99})
    front.ask(1, IDS, max_tokens=200, ignore_eos=True)
    front.ask(2, IDS, max_tokens=4)
    front.read(2)
    front.pipe.send({"abort": 1})
    front.pipe.send({"abort": 1})
    front.pipe.send({"abort": 2})
    front.read(1)
    assert front.ends[1] == ("abort", None)
    assert front.end() is None and is_clean(front.engine)


def test_steps_that_fail_again_and_again_end_it():
    def fail(batch: StepBatch) -> None:
        raise RuntimeError("gone")

    front = Front(PagedExecutor, fail)
    for key in range(2):
        front.ask(key, IDS, max_tokens=3)
        front.read(key)
        what, refused = front.ends[key][1]
        assert "gone" in what and not refused
    front.ask(2, IDS, max_tokens=3)
    front.read(2)
    error = front.end()
    assert isinstance(error, ExecutionError) and "gone" in str(error)
    front.close()


def test_a_step_that_fails_once_does_not():
    left = [2]

    def fail(batch: StepBatch) -> None:
        left[0] -= 1
        if left[0] in (0, 1):
            raise RuntimeError("gone")

    front = Front(PagedExecutor, fail)
    for key in range(4):
        front.ask(key, IDS, max_tokens=3)
        front.read(key)
    assert [front.ends[key][0] == "error" for key in range(4)] == [True, True, False, False]
    assert front.end() is None
    front.close()


def test_a_lost_rank_ends_it_at_once():
    def fail(batch: StepBatch) -> None:
        raise RankError("rank 1 is lost")

    front = Front(PagedExecutor, fail)
    front.ask(0, IDS, max_tokens=3)
    front.read(0)
    error = front.end()
    assert isinstance(error, RankError) and str(error) == "rank 1 is lost"
    front.close()


def test_the_other_side_is_gone(front: Front):
    front.ask(0, IDS, max_tokens=200, ignore_eos=True)
    front.ours.close()
    front._thread.join(LONG_S)
    assert isinstance(front.error, ExecutionError)


def test_it_ends_though_the_other_side_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sitsc.runtime.server.engine_service._CLOSING_S", 0.2)
    front = Front(PagedExecutor, drain_s=0.1)
    front.ask(0, IDS, max_tokens=10**6, ignore_eos=True)
    front.service._signal(signal.SIGTERM, None)
    front._thread.join(LONG_S)
    assert not front._thread.is_alive() and front.error is None
    front.close()


def test_a_second_signal_is_an_end_of_its_own():
    front = Front(PagedExecutor)
    front.service._signal(signal.SIGTERM, None)
    with pytest.raises(SystemExit, match="143"):
        front.service._signal(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        front.service._signal(signal.SIGINT, None)
    assert front.end() is None
    front.close()
