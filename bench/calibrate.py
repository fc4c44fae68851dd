"""Fits the cost model to measured results and writes sitsc/data/calibration/<target>.json.

`python bench/calibrate.py [TARGET]` reads bench/results/<target>_<model>.json. Each parameter is
fitted to one point on one device, of Llama-3-8B where one shows it; all others are the score.
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sitsc import lowering
from sitsc.core.calibration import Calibration, Parameter, Residual
from sitsc.core.hardware import TargetData, load_target
from sitsc.core.options import CompileOptions
from sitsc.core.records import to_value
from sitsc.models.presets import preset
from sitsc.passes.collectives import topology
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.op_time import Cut, Device, Sizes, device_of
from sitsc.passes.record_maker import record_of
from sitsc.passes.step_time import StepModel

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
MODELS = ("llama3-8b", "llama32-1b")
# parameter of Device → (model and point that it is fitted to, least, most, whether it adds time)
FITS = {
    "kernel_us": ("llama3-8b", "bs1_ctx128", 0.1, 20.0, True),
    "read_share": ("llama3-8b", "bs32_ctx1024", 0.2, 1.5, False),
    "matmul_share": ("llama3-8b", "ttft_2048", 0.2, 1.5, False),
    "fill_power": ("llama3-8b", "bs256_ctx512", 0.0, 3.0, True),
    "host_us": ("llama32-1b", "ttft_512", 0.0, 50.0, True),  # 8B never waits for the host
}
_ROUNDS, _HALVINGS = 12, 40
_FLOPS_PER_EXP = 256.0
_EXP_SOURCE = (
    "CUDA programming guide, compute capability 9.0: 16 exponentials a clock and multiprocessor; "
    "datasheet: 4096 dense bfloat16 operations a clock and multiprocessor"
)
Points = dict[tuple[str, str], tuple[Sizes, float]]


def record(model: str, target: str) -> ModelRecord:
    """The record of a preset as compiled for `target`."""
    config = preset(model)
    options = CompileOptions(target=target)
    dtypes = lowering.resolve_dtypes(config, options)
    module = lowering.trace(config, dtypes.torch_dtype)
    lowering.run(module, dtypes, options, None)
    return record_of(module.graph, model, config["vocab_size"], config["max_position_embeddings"])


def points(target: str, folder: Path = RESULTS) -> Points:
    """(model, point) → sizes of its step and measured milliseconds."""
    found: Points = {}
    for model in MODELS:
        report = json.loads((folder / f"{target}_{model}.json").read_text())
        for key, ms in report["sitsc"][model].items():
            if (sizes := step_sizes(key, report["detail"])) is not None:
                found[model, key] = (sizes, ms)
    return found


def step_sizes(key: str, detail: dict[str, Any]) -> Sizes | None:
    """The step behind a row of results: decode at its mean context, or a whole prompt."""
    if key.startswith("ttft_"):
        return Sizes(int(key[5:]), 1, 1, 0)
    if key.startswith("bs"):
        row = detail[key]
        batch = row["batch"]
        return Sizes(batch, batch, batch, round(row["mean_context"]))
    return None


def fit(device: Device, known: Points, step: Callable[[Device, str, Sizes], float]) -> Device:
    """Each parameter in turn by halving, until they agree."""
    for _ in range(_ROUNDS):
        for name, (model, point, low, high, adds) in FITS.items():
            sizes, ms = known[model, point]
            middle = low
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                more = step(replace(device, **{name: middle}), model, sizes) > ms
                low, high = (low, middle) if more == adds else (middle, high)
            device = replace(device, **{name: middle})
    return device


def parameters(device: Device, target: str, date: str) -> dict[str, Parameter]:
    """The fitted numbers with their source."""
    found = {}
    for field, (model, point, *_) in FITS.items():
        value, unit, name = getattr(device, field), "1", field
        if field.endswith("_us"):
            value, unit, name = 1e-6 * value, "s", field.replace("_us", "_seconds")
        source = f"fitted to {point}, bench/results/{target}_{model}.json, {date}"
        found[name] = Parameter(float(f"{value:.4g}"), unit, source)
    found["flops_per_exp"] = Parameter(_FLOPS_PER_EXP, "operations", _EXP_SOURCE)
    return found


def calibrate(target: str, folder: Path = RESULTS) -> Calibration:
    """Fit and score."""
    data: TargetData = load_target(target)
    records = {model: record(model, target) for model in MODELS}
    known, alone = points(target, folder), topology(1, 1, "nvlink", "nvlink")

    def step(device: Device, model: str, sizes: Sizes) -> float:
        return StepModel(records[model], device, alone).step_us(sizes, Cut()) / 1e3

    start = replace(
        device_of(data, None), read_share=0.9, matmul_share=0.9, flops_per_exp=_FLOPS_PER_EXP
    )
    report = json.loads((folder / f"{target}_{MODELS[0]}.json").read_text())
    made = parameters(fit(start, known, step), target, report["date"])
    device = device_of(data, Calibration(target, made, (), 0.0, 0.0))
    fitted = {(model, point) for model, point, *_ in FITS.values()}
    residuals = tuple(
        Residual(model, key, ms, float(f"{step(device, model, sizes):.5g}"), (model, key) in fitted)
        for (model, key), (sizes, ms) in known.items()
    )
    errors = [abs(r.error) for r in residuals if not r.fitted]
    median, worst = (float(f"{e:.3g}") for e in (statistics.median(errors), max(errors)))
    return Calibration(target, made, residuals, median, worst)


def main() -> None:
    """Write the file and print the residuals."""
    target = sys.argv[1] if len(sys.argv) > 1 else "h200"
    made = calibrate(target)
    path = ROOT / "sitsc" / "data" / "calibration" / f"{target}.json"
    path.write_text(json.dumps(to_value(made), indent=1) + "\n")
    for name, item in made.parameters.items():
        print(f"{name:15} {item.value:10.4g} {item.unit}")
    for r in made.residuals:
        note = "fitted" if r.fitted else ""
        print(
            f"{r.model:12} {r.point:14} {r.measured_ms:9.3f} {r.predicted_ms:9.3f} ms"
            f" {100 * r.error:+6.1f} % {note}"
        )
    print(f"median {100 * made.median_error:.1f} %, worst {100 * made.worst_error:.1f} %")


if __name__ == "__main__":
    main()
