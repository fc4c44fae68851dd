"""A process of its own that starts, answers once and reports: start-up time and peak memory.

`python -m sitsc.runtime.probe ART STARTED_NS TOKENS` prints one JSON object. STARTED_NS is the wall
clock of the parent just before it started this process.
"""

import json
import sys
import time
from pathlib import Path


def _status_kib(key: str) -> int:
    """A size of this process in KiB, from /proc."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    return 0


def main() -> None:
    """Load, generate and print what it took."""
    root, started_ns, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    began = time.time_ns()
    import torch  # noqa: F401, PLC0415  (the baseline of memory is a process that only has torch)

    torch_only, imported = _status_kib("VmRSS"), time.time_ns()
    from sitsc.core.sampling import SamplingOptions  # noqa: PLC0415
    from sitsc.runtime.loader import load  # noqa: PLC0415

    modules = time.time_ns()
    session = load(root)
    loaded = time.time_ns()
    first = 0
    ids = [session.artifact.plan.tokens.bos_token_id or 1, *range(20, 36)]
    for output in session.engine.generate(ids, SamplingOptions(max_tokens=count, ignore_eos=True)):
        first = first or time.time_ns()
        assert output.error is None, output.error
    phases = {
        "python": began - started_ns,
        "import_torch": imported - began,
        "import_sitsc": modules - imported,
        "load": loaded - modules,
        "first_token": first - loaded,
    }
    report = {
        "first_token_s": (first - started_ns) / 1e9,
        "timeline_s": {name: value / 1e9 for name, value in phases.items()},
        "load_s": session.timeline,
        "peak_bytes_above_torch": (_status_kib("VmHWM") - torch_only) * 1024,
        "weights_bytes": session.artifact.plan.memory.weights_bytes,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
