"""What commands share in printing: JSON for programs, units for people, progress for a terminal.

Results go to stdout; progress and remarks go to stderr, and only when it is a terminal.
"""

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from sitsc.core import stops
from sitsc.core.errors import OptionError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
MemoryLimit = Annotated[
    str | None, typer.Option(help="The most device memory to use: bytes, or with MiB, GiB, MB, GB.")
]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


def print_json(value: Any) -> None:
    """Print one JSON value with sorted keys."""
    print(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False))


def remark(text: str) -> None:
    """One line for a person who watches; nothing when stderr is a file or a pipe."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def table_lines(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Rows in columns under a header, the first row; `left` columns are text, others numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def bytes_text(count: float) -> str:
    """Bytes in decimal units: 269.0 MB."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def workload_text(path: Path) -> str:
    """The text of the file of --workload. Raises OptionError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"--workload: {error}", hint="name a JSON file") from None


def size_bytes(text: str | None) -> int | None:
    """The bytes that "80GiB", "0.5 GB" or "1048576" means. Raises OptionError."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z]{0,3})\s*", text)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or float(found[1]) == 0:
        raise OptionError(f"{text!r} is no size", hint="give bytes, or a number with MiB or GiB")
    return max(1, int(float(found[1]) * unit)) if "." in found[1] else int(found[1]) * unit


def count_text(count: float) -> str:
    """A count in thousands, millions …: 134.5 M."""
    for unit in ("", " K", " M", " G"):
        if count < 1000:
            return f"{count:.0f}" if not unit else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f} T"


class Phases:
    """Which phase of a job runs, its share done, and the seconds that each took."""

    def __init__(self, show: Callable[[str, float], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._show, self._last = show, time.perf_counter()
        self._phase = ""

    def report(self, phase: str, share: float) -> None:
        """A phase has come to `share`, from 0 to 1. Raises a stop that was asked for."""
        stops.check()
        now = time.perf_counter()
        if self._phase:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._last
        self._phase, self._last = phase, now
        self._show(phase, share)

    def end(self) -> None:
        """The job is done: the last phase ends here."""
        self.report("", 1.0)


class _Bars:
    """A bar a phase on stderr, drawn from the first report on."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._tasks: dict[str, Any] = {}

    def show(self, phase: str, share: float) -> None:
        for name, task in self._tasks.items():
            if name != phase:
                self._progress.update(task, total=1.0, completed=1.0)
        if phase and phase not in self._tasks:
            self._tasks[phase] = self._started().add_task(phase, total=None)
        if phase and share > 0:
            self._progress.update(self._tasks[phase], total=1.0, completed=share)

    def _started(self) -> Any:
        if self._progress is None:
            from rich.console import Console  # noqa: PLC0415  (a tenth of a second, seldom needed)
            from rich.progress import (  # noqa: PLC0415
                BarColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            columns = (TextColumn("{task.description:<10}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._progress.start()
        return self._progress

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextlib.contextmanager
def phases() -> Iterator[Phases]:
    """Progress of a job with phases; drawn when stderr is a terminal."""
    if not sys.stderr.isatty():
        yield Phases(lambda phase, share: None)
        return
    bars = _Bars()
    try:
        yield Phases(bars.show)
    finally:
        bars.close()


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """A spinner with the time, for work that does not say how far it is."""
    with phases() as shown:
        shown.report(what, 0.0)
        yield
