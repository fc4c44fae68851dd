"""How long each preset takes to compile up to its code, and the memory of it.

`python bench/compile_presets.py [-o FILE] [PRESET…]`: real headers over empty weights, each preset
and target in a process of its own. Tracing, passes and plan are measured: what `sitsc compile` does
before it makes code. Every value is one run; `seconds` is wall time, `cpu_seconds` of the process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "bench" / "results" / "compile_presets.json"
TARGETS = ("cpu", "h200")
LIMIT_SECONDS = 900
ABOUT = "seconds: wall time, with whatever else the machine does; cpu_seconds: the process's own"
CHILD = """
import json, resource, sys, time
start = time.perf_counter()
from sitsc.core.options import CompileOptions
from sitsc.pipeline import inspect, plan_checkpoint
options = CompileOptions(target=sys.argv[2])
plan = plan_checkpoint(inspect(sys.argv[1], options), options).plan
print(json.dumps({
    "seconds": round(time.perf_counter() - start, 1),
    "cpu_seconds": round(time.process_time(), 1),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "weights_bytes": plan.memory.weights_bytes,
    "layer_classes": len(plan.model.layer_classes),
}))
"""


def measure(name: str, target: str, folder: Path) -> dict[str, Any]:
    """One compile without code; `refused` holds the error of a target that cannot take it."""
    command = [sys.executable, "-c", CHILD, str(folder), target]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"refused": f"more than {LIMIT_SECONDS} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"refused": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(lines[-1])


def measure_all(names: list[str], out: Path) -> None:
    """Measure each of `names`, writing the file after each: a later run adds to it."""
    from sitsc.models.presets import preset  # noqa: PLC0415
    from sitsc.models.random_checkpoint import write_random  # noqa: PLC0415

    report = json.loads(out.read_text()) if out.exists() else {"presets": {}}
    report |= {"hardware": "2-core AMD EPYC", "date": date.today().isoformat()}
    report |= {"commit": _commit(), "about": ABOUT}
    report["versions"] = {name: version(name) for name in ("torch", "transformers")}
    for name in names:
        with tempfile.TemporaryDirectory() as place:
            folder = write_random(name, Path(place) / name, headers_only=True)
            results = {target: measure(name, target, folder) for target in TARGETS}
        report["presets"][name] = {"layers": preset(name)["num_hidden_layers"]} | results
        print(name, json.dumps(results), flush=True)
        out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Read the command line."""
    from sitsc.models.presets import PRESETS  # noqa: PLC0415

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", help="all but the tiny ones when none is named")
    parser.add_argument("-o", "--out", type=Path, default=RESULT)
    given = parser.parse_args()
    real = [name for name in PRESETS if not name.startswith("tiny-")]
    measure_all(given.presets or real, given.out)


if __name__ == "__main__":
    main()
