"""Stops of a command: each is seen, and ends the process with its exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A command that waits where Python loses an exception; `python -m` is how the mark shows.
MODULE = """
import signal, sys, time, weakref
from sitsc.core import stops
from sitsc.core.stops import ended_by_signals

class Thing:
    def __del__(self):
        wait()

def wait():
    print("ready", flush=True)
    time.sleep(60)

def lost():
    Thing()
    time.sleep(60)

def last():
    Thing()

def called_back():
    thing = type("Other", (), {{}})()
    reference = weakref.ref(thing, lambda _: wait())
    del thing
    time.sleep(60)

def caught():
    try:
        wait()
    except BaseException:
        pass

def checked():
    caught()
    stops.check()
    print("put in place")
    time.sleep(60)

def followed():
    caught()
    stops.settle()

def text():
    exec("wait()")

def main():
    try:
        with ended_by_signals():
            {name}()
    except KeyboardInterrupt:
        return 130

sys.exit(main())
"""

NAMES = ("wait", "lost", "last", "called_back", "caught", "checked", "text")


def started(name: str, tmp_path: Path) -> subprocess.Popen[str]:
    """A process in which that function of MODULE has come to wait."""
    (tmp_path / "command.py").write_text(MODULE.format(name=name))
    process = subprocess.Popen(
        [sys.executable, "-m", "command"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", NAMES)
def test_no_stop_is_lost(name: str, number: signal.Signals, tmp_path: Path):
    process = started(name, tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + number, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_that_is_followed_is_no_error(number: signal.Signals, tmp_path: Path):
    process = started("followed", tmp_path)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize("error", ["ValueError(7)", "SystemExit(7)"])
def test_other_lost_errors_are_still_told(error: str, tmp_path: Path):
    """An exit that a destructor asks for is none of ours."""
    text = MODULE.format(name="Thing").replace("    time.sleep(60)\n", f"    raise {error}\n", 1)
    (tmp_path / "command.py").write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "command"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ended.returncode == 0 and error.replace("(7)", ": 7") in ended.stderr
