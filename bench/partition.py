"""Predictions of partitions against what was measured: bench/results/partition_<target>.json.

What it says of several ranks it also writes to sitsc/data/residuals/<target>.json, which error bars
of partitions are made of.

`python -m bench.partition [TARGET]` reads <target>_<model>.json (one device) and, where they lie
beside it, <target>_<model>_tp2.json and _pp2.json. Errors are fractions of the measured time.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.calibrate import MODELS, RESULTS, record, step_sizes
from sitsc.core.actual import read_actual
from sitsc.core.calibration import (
    RankResidual,
    RankResiduals,
    load_calibration,
    residuals_file,
)
from sitsc.core.hardware import load_target
from sitsc.core.parallel import Partition
from sitsc.core.records import to_value
from sitsc.passes.collectives import topology_of
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.partition import Search, machine

PARTITIONS = {"": Partition(), "_tp2": Partition(tp=2), "_pp2": Partition(pp=2)}
_TIE = 1.03  # measured times nearer than that have no order


@dataclass(frozen=True, slots=True)
class Point:
    """One measured row, what was predicted, and whether the calibration used it."""

    model: str
    partition: str
    point: str
    measured_ms: float
    predicted_ms: float
    error: float
    fitted: bool


def score(target: str, models: dict[str, ModelRecord], folder: Path = RESULTS) -> dict[str, Any]:
    """The value of the file: all points, median and worst error of those that were not fitted."""
    data, found = load_target(target), []
    own = load_calibration(target)
    used = {(r.model, r.point) for r in own.residuals if r.fitted} if own is not None else set()
    for model, made in models.items():
        for suffix, partition in PARTITIONS.items():
            path = folder / f"{target}_{model}{suffix}.json"
            if not path.is_file():
                continue
            where = topology_of(data, partition.num_ranks)
            replica = Search(made, machine(data, where)).replica(partition)
            for point in read_actual(path).points:
                if (sizes := step_sizes(point)) is None:
                    continue
                key, ms = point.key, point.value
                decode = sizes.tokens == sizes.sequences
                us = (
                    replica.decode(sizes.tokens, sizes.context)
                    if decode
                    else replica.prefill(sizes.tokens)
                ).us
                fitted = not suffix and (model, key) in used
                error = float(f"{us / 1e3 / ms - 1:.4g}")
                predicted = float(f"{us / 1e3:.5g}")
                found.append(Point(model, partition.text(), key, ms, predicted, error, fitted))
    errors = [abs(p.error) for p in found if not p.fitted]
    return {
        "about": "predicted against measured milliseconds; errors are fractions",
        "target": target,
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "order_kept": order_kept(found),
        "points": [to_value(p) for p in found],
    }


def of_ranks(target: str, value: dict[str, Any], folder: Path = RESULTS) -> RankResiduals:
    """The points of several ranks of a scored file, with the source of each."""
    cuts = {one.text(): (suffix, one) for suffix, one in PARTITIONS.items() if suffix}
    found = []
    for p in value["points"]:
        if p["partition"] not in cuts:
            continue
        suffix, one = cuts[p["partition"]]
        actual = read_actual(folder / f"{target}_{p['model']}{suffix}.json")
        found.append(
            RankResidual(
                model=p["model"],
                point=p["point"],
                tp=one.tp,
                pp=one.pp,
                measured_ms=p["measured_ms"],
                predicted_ms=p["predicted_ms"],
                source=f"{actual.hardware}, {actual.date}, plan {actual.plan[:12]}",
            )
        )
    return RankResiduals(target, tuple(found))


def order_kept(found: list[Point]) -> bool:
    """Whether partitions are ordered as measured at every point, but for near ties."""
    for one, two in combinations(found, 2):
        if (one.model, one.point) != (two.model, two.point):
            continue
        if max(one.measured_ms, two.measured_ms) < _TIE * min(one.measured_ms, two.measured_ms):
            continue
        if (one.measured_ms < two.measured_ms) != (one.predicted_ms < two.predicted_ms):
            return False
    return True


def main() -> None:
    """Write both files and print the figures."""
    target = sys.argv[1] if len(sys.argv) > 1 else "h200"
    value = score(target, {model: record(model, target) for model in MODELS})
    path = RESULTS / f"partition_{target}.json"
    path.write_text(json.dumps(value, indent=1) + "\n")
    file = residuals_file(target)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(to_value(of_ranks(target, value)), indent=1) + "\n")
    for p in value["points"]:
        print(
            f"{p['model']:12} {p['partition']:10} {p['point']:14} {p['measured_ms']:9.3f} "
            f"{p['predicted_ms']:9.3f} ms {100 * p['error']:+6.1f} % {'fitted' * p['fitted']}"
        )
    print(
        f"median {100 * value['median_error']:.1f} %, worst {100 * value['worst_error']:.1f} %, "
        f"order {'kept' if value['order_kept'] else 'NOT kept'}"
    )


if __name__ == "__main__":
    main()
