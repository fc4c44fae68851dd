"""Stops of a command by a signal: SIGINT and SIGTERM end it like an exception.

What is half written goes as it does after any other error. Such an exception can get lost while a
library is imported or traces: in a destructor or a callback, or where every exception is caught;
and text run by `exec` marks the process as one to be ended by the signal, although the exception
was caught. So a stop is remembered: it comes again, at the latest before anything is put in place.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

TERMINATED = 143
_AGAIN_SECONDS = 0.01
_asked_for: list[BaseException] = []


def check() -> None:
    """Raises the stop that was asked for, if there is one: somebody has caught it."""
    if _asked_for:
        raise _asked_for[-1]


def settle() -> None:
    """The stop that was asked for is being followed by whoever has caught it: forget it."""
    _asked_for.clear()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """In here SIGTERM raises SystemExit, SIGINT KeyboardInterrupt, and none of them is lost.

    A SIGINT that is ignored, as in the background of a shell, stays so.
    """
    usual, timers = sys.unraisablehook, list[threading.Timer]()

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        stop = KeyboardInterrupt() if number == signal.SIGINT else SystemExit(TERMINATED)
        _asked_for.append(stop)
        raise stop

    def again(unraisable: "sys.UnraisableHookArgs") -> None:
        """A stop that was raised where nobody can catch it comes once more, a moment later."""
        stop = unraisable.exc_value
        if not any(stop is one for one in _asked_for):
            usual(unraisable)
            return
        number = signal.SIGINT if isinstance(stop, KeyboardInterrupt) else signal.SIGTERM
        timers.append(threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number)))
        timers[-1].daemon = True
        timers[-1].start()

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    _asked_for.clear()
    before = {number: signal.signal(number, end) for number in numbers}
    sys.unraisablehook = again
    try:
        yield
        check()
    finally:
        for timer in timers:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = usual
        _asked_for.clear()
        exec("")  # every run of a text takes the mark of an earlier one away
