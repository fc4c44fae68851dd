"""What plans predict beside what was measured and what the partition's model says.

`python -m bench.plan_residuals [TARGET]` plans the measured models in full, writes
bench/results/plan_<target>.json, puts the table into docs/plan.md and prints it.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.calibrate import MODELS, RESULTS
from sitsc.actual_pipeline import residuals
from sitsc.core.actual import read_actual
from sitsc.core.calibration import load_calibration
from sitsc.core.options import CompileOptions
from sitsc.models.presets import preset
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint

DOCS = Path(__file__).parents[1] / "docs" / "plan.md"
_BEGIN, _END = "<!-- residuals: begin -->", "<!-- residuals: end -->"


def rows(target: str, model: str) -> list[dict[str, Any]]:
    """One row a measured point, milliseconds (a start: seconds) and relative errors."""
    options = CompileOptions(
        target=target, max_batch=256, prefill_chunk_tokens=8192, kv_tokens=150_000
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_random(preset(model), Path(folder) / model, headers_only=True)
        plan = plan_checkpoint(inspect(checkpoint, options), options).plan
    # Measured with kernels as they were then: the plan of today stands beside it.
    actual = replace(read_actual(RESULTS / f"{target}_{model}.json"), plan=plan.sha256())
    own = load_calibration(target)
    known = {(r.model, r.point): r for r in own.residuals} if own is not None else {}
    found = []
    for line in residuals(plan, actual).ends:
        other = known.get((model, line.name))
        found.append(
            {
                "model": model,
                "point": line.name,
                "unit": line.unit,
                "measured": float(f"{line.measured:.5g}"),
                "plan": float(f"{line.predicted:.5g}"),
                "plan_error": float(f"{line.error:.3g}"),
                "bar": line.bar,
                "partition": other and other.predicted_ms,
                "partition_error": other and float(f"{other.error:.3g}"),
                "fitted": bool(other and other.fitted),
            }
        )
    return found


def main() -> None:
    """Write the file and print the table."""
    target = sys.argv[1] if len(sys.argv) > 1 else "h200"
    found = [row for model in MODELS for row in rows(target, model)]
    value = {"about": "plan and partition against measured; errors are fractions", "points": found}
    (RESULTS / f"plan_{target}.json").write_text(json.dumps(value, indent=1) + "\n")
    table = lines(found)
    text = DOCS.read_text()
    before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
    DOCS.write_text("\n".join([before + _BEGIN, *table, _END]) + after)
    print("\n".join(table))


def lines(found: list[dict[str, Any]]) -> list[str]:
    """The table as Markdown."""
    out = [
        "| model | point | measured | plan | error | partition's model |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        other = row["partition_error"]
        text = "" if other is None else f"{100 * other:+.1f} %{' (fitted)' * row['fitted']}"
        figures = f"{row['measured']:.3f} {row['unit']} | {row['plan']:.3f} {row['unit']}"
        error = f"{100 * row['plan_error']:+.1f} %"
        out.append(f"| {row['model']} | {row['point']} | {figures} | {error} | {text} |")
    return out


if __name__ == "__main__":
    main()
