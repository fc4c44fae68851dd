"""Ranks as processes of one machine: started, watched, ended together.

In: a command line and how many. Out: the exit code of the whole. The first process is rank 0 and
writes the answer; when any ends badly the others are ended, and the rank is named.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from sitsc.core import stops
from sitsc.core.errors import OptionError

_POLL_S, _PATIENCE_S, _ENDING_S = 0.05, 2.0, 10.0
_HOST = "127.0.0.1"
_TERMINATED = (128 + signal.SIGTERM, -signal.SIGTERM)


def run_ranks(
    command: Sequence[str], count: int, port: int = 0, drain_s: float | None = None
) -> int:
    """Run `command` as `count` ranks and wait; 0 when all ended well, else 1 and an error line.

    `port` 0 takes a free one. With `drain_s` a signal that ends this process is told to rank 0
    alone, and all have so many seconds to end by themselves. Raises OptionError for a port in use.
    """
    port = _free_port(port)
    soft = drain_s is not None
    jobs = [_start(command, rank, count, port, soft) for rank in range(count)]
    try:
        return _wait(jobs)
    except (KeyboardInterrupt, SystemExit):
        if drain_s is None:
            raise
        stops.settle()
        jobs[0].terminate()
        return _wait(jobs, time.monotonic() + drain_s + _ENDING_S, _TERMINATED)
    finally:
        _end([job for job in jobs if job.poll() is None])


def _start(
    command: Sequence[str], rank: int, count: int, port: int, soft: bool
) -> "subprocess.Popen[bytes]":
    """One rank; a `soft` one does not get the signals of a terminal, which go to its group."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    place |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(port)}
    threads = max(1, (os.cpu_count() or 1) // count)
    usual = {"OMP_NUM_THREADS": str(threads), "SITSC_THREADS": str(threads)}
    stdin = None if rank == 0 else subprocess.DEVNULL
    env, group = usual | os.environ | place, 0 if soft else None
    return subprocess.Popen(list(command), env=env, stdin=stdin, process_group=group)


def _wait(
    jobs: "list[subprocess.Popen[bytes]]", until: float = math.inf, wanted: tuple[int, ...] = ()
) -> int:
    """Until all have ended, or one has ended badly, or it is too late.

    A rank 0 that ends with a code that is `wanted` ends the job with it, and nothing is said.
    """
    while time.monotonic() < until:
        codes = [job.poll() for job in jobs]
        if codes[0] in wanted:
            return codes[0] if codes[0] > 0 else 128 - codes[0]
        bad = next((rank for rank, code in enumerate(codes) if code), None)
        if bad is not None:
            code = codes[bad]
            assert code is not None
            print(f"sitsc: rank {bad} {_what(code)}; all ranks were ended", file=sys.stderr)
            return 1
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_S)
    print("sitsc: ranks did not end in time; all were ended", file=sys.stderr)
    return 1


def _what(code: int) -> str:
    if code > 0:
        return f"ended with code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def _end(jobs: "list[subprocess.Popen[bytes]]") -> None:
    """Ask, then force; only what was started here."""
    for job in jobs:
        job.terminate()
    until = time.monotonic() + _PATIENCE_S
    for job in jobs:
        try:
            job.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def _free_port(port: int) -> int:
    """The port, or a free one for 0. Raises OptionError when it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except (OSError, OverflowError):
            raise OptionError(
                f"port {port} cannot be used", hint="another program has it: leave out --port"
            ) from None
        return probe.getsockname()[1]
