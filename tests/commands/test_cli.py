"""The command line as a whole: help, versions, usage errors, exit codes, pipes and signals."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sitsc import __version__
from tests.commands.command_line import call, spawn, start

COMMANDS = [
    "compile",
    "run",
    "bench",
    "plan show",
    "verify",
    "demo",
    "models list",
    "models random",
]
HEAVY = ("torch", "transformers", "rich", "numpy", "tokenizers", "jinja2")


def test_version(capfd):
    assert call(capfd, "--version").out == f"sitsc {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_offers_json(command: str, capfd):
    result = call(capfd, *command.split(), "--help")
    assert (result.code, result.err) == (0, "")
    assert "--json" in result.out


@pytest.mark.parametrize("command", [[], ["plan"], ["models"]])
def test_nothing_asked_for_is_answered_with_help(command: list[str], capfd):
    result = call(capfd, *command)
    assert result.code == 2
    assert "Commands:" in result.out and result.err == ""


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["compiel"], "compiel"),
        (["compile"], "Missing argument"),
        (["run", "artifact"], "Missing argument"),
        (["compile", "m", "--colour"], "--colour"),
        (["run", "artifact", "text", "--max-tokens", "many"], "--max-tokens"),
        (["models", "random", "tiny-llama"], "--out"),
        (["verify"], "Missing argument"),
        (["bench"], "Missing argument"),
    ],
)
def test_usage_errors_are_one_line(command: list[str], part: str, capfd):
    call(capfd, *command).refused(2, part, "--help")


def test_starting_imports_nothing_heavy():
    code = f"import sys, sitsc.cli; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_closed_pipe_is_no_error(tiny_artifact: Path):
    """`sitsc plan show … | head` ends quietly, as every filter does."""
    process = start("plan", "show", tiny_artifact, "--json")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_quietly(number: signal.Signals, code: int, tmp_path: Path):
    process = start("run", tmp_path, "-", stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stderr is not None
    process.stdin.write("x" * (1 << 18))  # more than a pipe holds: the process has begun to read
    time.sleep(0.5)  # and soon waits for more
    process.send_signal(number)
    assert process.wait(60) == code
    assert process.stderr.read() == ""


def test_a_bad_environment_is_told(tiny_artifact: Path):
    result = spawn("run", tiny_artifact, "hello", env={"SITSC_THREADS": "two"})
    result.refused(2, "SITSC_THREADS='two'")


def test_progress_is_drawn_on_a_terminal_alone(tiny_artifact: Path):
    """With a terminal as stderr the phases are drawn and wiped; stdout stays clean."""
    ours, theirs = os.openpty()
    process = start("verify", tiny_artifact, stderr=theirs)
    os.close(theirs)
    assert process.stdout is not None
    out = process.stdout.read()
    drawn = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while piece := os.read(ours, 4096):
            drawn += piece
    os.close(ours)
    assert process.wait(60) == 0
    assert b"checksums" in drawn
    assert out == f"{tiny_artifact}: every file is as it was compiled\n"
