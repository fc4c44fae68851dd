"""A process of its own that starts, answers once and reports: start-up time and peak memory.

`python -m sitsc.runtime.probe ART STARTED_NS TOKENS [--random-weights] [--weights DIR]
[--memory-limit BYTES]` prints one JSON object: the report, or the mistake that ended it, with its
exit code. STARTED_NS is the wall clock of the parent just before it started this process.
"""

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from sitsc.core import errors
from sitsc.core.errors import ExecutionError, SitscError

_STATUS = Path("/proc/self/status")


def status_bytes(key: str) -> int:
    """A size of this process ("VmRSS", "VmHWM"), from /proc; 0 where the system has none."""
    if not _STATUS.is_file():
        return 0
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _options(arguments: list[str]) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("started_ns", type=int)
    parser.add_argument("tokens", type=int)
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--memory-limit", type=int)
    return parser.parse_args(arguments)


def told(error: SitscError) -> str:
    """A mistake as a line of JSON, for `error_of`."""
    parts = {"what": error.what, "where": error.where, "hint": error.hint}
    return json.dumps({"error": type(error).__name__} | parts)


def error_of(stdout: str, stderr: str, what: str) -> SitscError:
    """The mistake that a probe told in its last line, else an ExecutionError about `what`."""
    try:
        value = json.loads(stdout.strip().splitlines()[-1])
        kind = getattr(errors, value["error"])
        return kind(value["what"], where=value["where"], hint=value["hint"])
    except (ValueError, LookupError, TypeError, AttributeError):
        last = (stderr.strip().splitlines() or ["no message"])[-1]
        return ExecutionError(f"{what} failed: {last}")


def main() -> int:
    """Load, generate and print what it took; the exit code."""
    began = time.time_ns()
    try:
        print(json.dumps(_report(began)))
    except SitscError as error:
        print(told(error))
        return error.exit_code
    return 0


def _report(began: int) -> dict[str, Any]:
    given = _options(sys.argv[1:])
    import torch  # noqa: PLC0415  (the baseline of memory is a process that only has torch)

    torch_only, imported = status_bytes("VmRSS"), time.time_ns()
    from sitsc.core.sampling import SamplingOptions  # noqa: PLC0415
    from sitsc.runtime.loader import load  # noqa: PLC0415

    modules = time.time_ns()
    session = load(
        given.artifact,
        weights=given.weights,
        random_weights=given.random_weights,
        memory_limit=given.memory_limit,
    )
    loaded = time.time_ns()
    first = 0
    plan = session.artifact.plan
    ids = [plan.tokens.bos_token_id or 1, *range(20, 36)]
    options = SamplingOptions(max_tokens=given.tokens, ignore_eos=True)
    for output in session.engine.generate(ids, options):
        first = first or time.time_ns()
        if output.error is not None:
            raise output.error
    phases = {
        "python": began - given.started_ns,
        "import_torch": imported - began,
        "import_sitsc": modules - imported,
        "load": loaded - modules,
        "first_token": first - loaded,
    }
    report: dict[str, Any] = {
        "first_token_s": (first - given.started_ns) / 1e9,
        "timeline_s": {name: value / 1e9 for name, value in phases.items()},
        "load_s": session.timeline,
        "beside_s": session.beside,
        "peak_bytes_above_torch": status_bytes("VmHWM") - torch_only,
        "weights_bytes": plan.memory.weights_bytes,
    }
    if plan.target.isa.startswith("sm_"):
        report["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    return report


if __name__ == "__main__":
    sys.exit(main())
