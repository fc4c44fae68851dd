"""Stops of a command by a signal: SIGINT and SIGTERM end it like an exception.

What is half written goes as it does after any other error. Python loses such an exception in two
places, both met while a library is imported: a destructor or a callback swallows it, and text run
by `exec` marks the process as one to be ended by the signal, although the exception was caught.
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
_NUMBERS = {KeyboardInterrupt: signal.SIGINT, SystemExit: signal.SIGTERM}


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """In here SIGTERM raises SystemExit, SIGINT KeyboardInterrupt, and none of them is lost."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise SystemExit(TERMINATED)

    hook, sys.unraisablehook = sys.unraisablehook, _again
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.unraisablehook = hook
        exec("")  # every run of a text takes the mark of an earlier one away


def _again(unraisable: "sys.UnraisableHookArgs") -> None:
    """A stop that was raised where nobody can catch it comes once more, a moment later."""
    number = _NUMBERS.get(unraisable.exc_type)
    if number is None:
        sys.__unraisablehook__(unraisable)
        return
    again = threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()
