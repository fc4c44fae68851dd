"""Commands over several ranks: one starts the processes, each of them runs the command again."""

import sys
from pathlib import Path

from sitsc.core import env
from sitsc.core.errors import OptionError

_OURS = ("--nproc", "--port")


def follows() -> bool:
    """Whether this process is a rank that only does what rank 0 tells it."""
    return env.launched_rank() not in (None, "0")


def start_ranks(
    artifact: Path,
    count: int,
    port: int,
    options: tuple[str, ...] = _OURS,
    drain_s: float | None = None,
) -> int:
    """Run this very command as `count` ranks; the exit code. Raises SitscError.

    `options` are those of the command that are not for the ranks; with `drain_s` a signal is told
    to rank 0 alone, which then has so many seconds to end.
    """
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (imports torch)
    from sitsc.runtime.rank_processes import run_ranks  # noqa: PLC0415

    wanted = open_artifact(artifact).plan.num_ranks
    if count != wanted:
        raise OptionError(
            f"--nproc {count}: the artifact is for {wanted} rank{'s' * (wanted > 1)}",
            hint=f"--nproc {wanted}" if wanted > 1 else "leave out --nproc",
        )
    if wanted == 1:
        raise OptionError("the artifact is for one rank", hint="leave out --nproc")
    command = [sys.executable, "-m", "sitsc.cli", *_without(sys.argv[1:], options)]
    return run_ranks(command, count, port, drain_s)


def _without(arguments: list[str], names: tuple[str, ...]) -> list[str]:
    """The arguments less these options and their values."""
    found, skip = [], False
    for argument in arguments:
        if skip:
            skip = False
        elif argument in names:
            skip = True
        elif not argument.startswith(tuple(f"{name}=" for name in names)):
            found.append(argument)
    return found
