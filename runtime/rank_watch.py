"""Noticing lost ranks: signs of life and of progress in the store, compared once a second.

A rank that gives no sign for `SILENT` seconds is dead or frozen; one that computes for `STUCK`
seconds longer than it may while another waits for it does not advance. Either ends the job on all
other ranks. So does a step of GPUs that takes as long while no rank computes: their kernels wait
for each other, and would go on without what they wait for.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PERIOD, SILENT, STUCK = 0.5, 4.0, 8.0
_IDLE, _BUSY, _WAITING, _DEVICE = 0, 1, 2, 3


@dataclass(slots=True)
class _Seen:
    """What was last seen of a rank, and since when it is so."""

    sign: str = ""
    since: float = 0.0
    progress: tuple[int, int] = (0, 0)
    progress_since: float = 0.0


class Watch:
    """This rank's signs, and a thread that looks at those of the others.

    `fail` gets one line about the first rank that is lost. `now` is a clock in seconds.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        fail: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._fail, self._now = fail, now
        self._state, self._steps, self._beats = _IDLE, 0, 0
        self._may_take = self._since = 0.0
        self._stop, self._told = threading.Event(), threading.Event()
        self._found: str | None = None
        self._seen = {other: _Seen() for other in range(size) if other != rank}
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self.beat()
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye: from now on nobody misses this rank."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * PERIOD)
        try:
            self._store.set(self._key(self._rank), "done")
        except RuntimeError:  # the rank that holds the store has gone before
            return

    @contextmanager
    def busy(self, seconds: float = 0.0) -> Iterator[None]:
        """This rank computes; others may wait for it, for `seconds` more than usual."""
        self._may_take = seconds
        with self._in(_BUSY):
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This rank waits for another in the middle of a step."""
        with self._in(_WAITING):
            yield

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """This rank waits for a step that the GPUs of all compute."""
        self._since = self._now()
        with self._in(_DEVICE):
            yield

    @contextmanager
    def _in(self, state: int) -> Iterator[None]:
        """For a while in another state; beginning and end are steps forward."""
        before, self._state = self._state, state
        self._steps += 1
        try:
            yield
        finally:
            self._steps += 1
            self._state = before

    def verdict(self, seconds: float) -> str | None:
        """What the watch comes to find in that time; None if nothing."""
        self._told.wait(seconds)
        return self._found

    def beat(self) -> None:
        """Leave a sign of life. Raises RuntimeError when the store is gone."""
        self._beats += 1
        self._store.set(self._key(self._rank), self._sign())

    def _sign(self) -> str:
        return f"{self._beats}:{self._state}:{self._steps}:{self._may_take:.0f}"

    def look(self) -> str | None:
        """What is wrong with another rank, if anything. Raises RuntimeError as `beat`."""
        now, waits, slow = self._now(), self._state in (_WAITING, _DEVICE), []
        stands = self._state == _DEVICE and now - self._since > STUCK
        for other, seen in self._seen.items():
            if not self._store.check([self._key(other)]):
                seen.since = seen.since or now
                if now - seen.since > STUCK:
                    return f"rank {other} has given no sign of life since it was started"
                continue
            sign = self._store.get(self._key(other)).decode()
            if sign == "done":
                if waits:
                    return f"rank {other} has ended while others wait for it"
                continue
            if sign != seen.sign:
                seen.sign, seen.since = sign, now
            elif now - seen.since > SILENT:
                return f"rank {other} is dead or frozen: no sign of life for {SILENT:g} s"
            _, state, steps, more = (int(part) for part in sign.split(":"))
            if (state, steps) != seen.progress:
                seen.progress, seen.progress_since = (state, steps), now
            waits = waits or state in (_WAITING, _DEVICE)
            stands = stands and state != _BUSY
            if state == _BUSY and now - seen.progress_since > STUCK + more:
                slow.append(other)
        if waits and slow:
            return f"rank {slow[0]} is stuck: others have waited for it for {STUCK:g} s"
        if stands:
            return f"a step takes {STUCK:g} s: the GPUs of the ranks wait for each other"
        return None

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            try:
                self.beat()
                found = self.look()
            except RuntimeError:
                found = "rank 0 is dead: the store that it holds is gone"
            if found is not None and not self._stop.is_set():
                self._found = found
                self._told.set()
                self._fail(found)
                return

    @staticmethod
    def _key(rank: int) -> str:
        return f"life/{rank}"
