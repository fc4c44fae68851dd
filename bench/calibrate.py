"""Calibrates a target from the committed results alone: `python -m bench.calibrate [TARGET]`.

It is `sitsc plan calibrate TARGET --fresh` over bench/results/<target>_<model>.json of the models
that are measured at every change; the fit itself is sitsc/calibration_pipeline.py.
"""

import sys
from pathlib import Path

from sitsc import lowering
from sitsc.calibration_pipeline import calibrate as fit
from sitsc.commands.calibration_view import lines
from sitsc.core.actual import TPOT, TTFT, Measured, actual_of_report, read_actual
from sitsc.core.calibration import Calibration, calibration_file, calibration_text
from sitsc.core.options import CompileOptions
from sitsc.models.presets import preset
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.op_time import Sizes
from sitsc.passes.record_maker import record_of

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
MODELS = ("llama3-8b", "llama32-1b")

__all__ = ["MODELS", "RESULTS", "actual_of_report", "calibrate", "points", "record", "step_sizes"]


def record(model: str, target: str) -> ModelRecord:
    """The record of a preset as compiled for `target`."""
    config = preset(model)
    options = CompileOptions(target=target)
    dtypes = lowering.resolve_dtypes(config, options)
    module = lowering.trace(config, dtypes.torch_dtype)
    lowering.run(module, dtypes, options, None)
    return record_of(module.graph, model, config["vocab_size"], config["max_position_embeddings"])


def points(target: str, folder: Path = RESULTS) -> dict[tuple[str, str], tuple[Sizes, float]]:
    """(model, point) → sizes of its step and measured milliseconds."""
    found = {}
    for model in MODELS:
        for point in read_actual(folder / f"{target}_{model}.json").points:
            if (sizes := step_sizes(point)) is not None:
                found[model, point.key] = (sizes, point.value)
    return found


def step_sizes(point: Measured) -> Sizes | None:
    """The step behind a figure: decode at its mean context, or a whole prompt."""
    if point.kind == TTFT:
        return Sizes(point.tokens, 1, 1, 0)
    if point.kind == TPOT:
        return Sizes(point.sequences, point.sequences, point.sequences, round(point.context))
    return None


def calibrate(target: str, folder: Path = RESULTS) -> Calibration:
    """Fit and score."""
    results = [read_actual(folder / f"{target}_{model}.json") for model in MODELS]
    return fit(target, results, lambda model: record(model, target), fresh=True)


def main() -> None:
    """Write the file and print the residuals."""
    target = sys.argv[1] if len(sys.argv) > 1 else "h200"
    made = calibrate(target)
    calibration_file(target).write_text(calibration_text(made))
    print("\n".join(lines(made)))


if __name__ == "__main__":
    main()
