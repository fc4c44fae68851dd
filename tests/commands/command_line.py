"""Calling the command line in tests: in this process, or in one of its own."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sitsc.cli import main


@dataclass(frozen=True, slots=True)
class Result:
    """What one call came to."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *parts: str) -> None:
        """One line on stderr that has all `parts`, nothing on stdout, no traceback."""
        lines = self.err.splitlines()
        assert self.code == code, self
        assert len(lines) == 1 and lines[0].startswith("sitsc: "), self
        assert all(part in lines[0] for part in parts), self
        assert self.out == "", self


def call(capfd: pytest.CaptureFixture[str], *arguments: object) -> Result:
    """Run in this process: for commands that load no kernels."""
    capfd.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return Result(code, out, err)


def start(*arguments: object, **settings: object) -> subprocess.Popen[str]:
    """A process of `sitsc`; `settings` are those of Popen."""
    command = [sys.executable, "-m", "sitsc.cli", *map(str, arguments)]
    pipe = subprocess.PIPE
    root = Path(__file__).parents[2]
    usual = {
        "stdout": pipe,
        "stderr": pipe,
        "text": True,
        "cwd": root,
        "preexec_fn": _interruptible,
    }
    return subprocess.Popen(command, **(usual | settings))  # pyright: ignore


def _interruptible() -> None:
    """A shell starts what runs in its background with SIGINT ignored; children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def spawn(*arguments: object, stdin: str = "", env: dict[str, str] | None = None) -> Result:
    """Run in a process of its own."""
    process = start(*arguments, stdin=subprocess.PIPE, env=os.environ | (env or {}))
    out, err = process.communicate(stdin, timeout=300)
    return Result(process.returncode, out, err)
