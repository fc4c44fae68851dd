"""Predictions of plans for GPUs against the partition's model and against measurements.

Presets are planned with two layers, and then counted as deep as they are.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.calibrate import MODELS, points
from sitsc.core.calibration import load_calibration
from sitsc.core.hardware import load_target
from sitsc.core.options import CompileOptions
from sitsc.core.plan import DRAW_GROUP, STEP_GROUPS, Plan, Regime
from sitsc.core.serving.simulator import BatchSizes, Piece
from sitsc.models.presets import preset
from sitsc.models.random_checkpoint import write_random
from sitsc.passes.collectives import topology
from sitsc.passes.launch_time import step_us
from sitsc.passes.op_time import Cut, device_of
from sitsc.passes.plan_time import PlanTime, launch_seconds
from sitsc.passes.step_time import StepModel
from sitsc.pipeline import inspect, plan_checkpoint
from tests.partition_records import record


@cache
def plan_of(name: str, folder: Path, target: str = "h200", **more: Any) -> Plan:
    checkpoint = folder / f"{name}-{target}-{len(more)}"
    write_random(preset(name) | {"num_hidden_layers": 2}, checkpoint, headers_only=True)
    sizes: dict[str, Any] = {"max_batch": 256, "prefill_chunk_tokens": 8192, "kv_tokens": 150_000}
    options = CompileOptions(target=target, **(sizes | more))
    return plan_checkpoint(inspect(checkpoint, options), options).plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


def deep(regime: Regime, layers: int) -> Regime:
    """The regime of a model with so many layers like its first one."""
    first = next(g for g in regime.groups if g.layers)
    times = layers - sum(len(g.layers) for g in regime.groups) + len(first.layers)
    groups = tuple(
        replace(g, layers=tuple(range(times))) if g is first else g for g in regime.groups
    )
    grown = times / len(first.layers)
    rows = tuple(
        replace(r, predicted_us=r.predicted_us * (grown if r.layer_class == first.name else 1))
        for r in regime.kernels
    )
    device = device_of(load_target("h200"), load_calibration("h200"))
    return replace(
        regime, groups=groups, kernels=rows, predicted_us=step_us(groups, regime.kind, device)
    )


@pytest.mark.parametrize("name", MODELS)
def test_plans_say_what_was_measured(name, folder):
    """Within 12 % of every point, 5 % in the middle, and within 5 % of the partition's model.

    The plan counts the kernels that tiles ask for: more of them for 8 sequences than the other.
    """
    plan = plan_of(name, folder)
    depth = preset(name)["num_hidden_layers"]
    regimes = [deep(regime, depth) for regime in plan.regimes]
    time = PlanTime([regimes], launch=launch_seconds(plan))
    device = device_of(load_target("h200"), load_calibration("h200"))
    model = StepModel(record(name), device, topology(1, 1, "nvlink", "infiniband"))
    errors, lines = [], []
    for (which, key), (sizes, ms) in points("h200").items():
        if which != name:
            continue
        if sizes.tokens == sizes.sequences:
            step = BatchSizes(sizes.sequences, sizes.sequences * sizes.context)
        else:
            step = BatchSizes(0, 0, (Piece(sizes.tokens, 0, True),))
        mine, theirs = 1e3 * time(step).stages[0], model.step_us(sizes, Cut()) / 1e3
        errors.append(abs(mine / ms - 1))
        lines.append(f"{key:14} {ms:9.3f} measured {mine:9.3f} plan {theirs:9.3f} partition")
        assert mine == pytest.approx(theirs, rel=0.05), lines[-1]
    print("\n".join(lines))  # shown with -s
    assert max(errors) < 0.12 and sorted(errors)[len(errors) // 2] < 0.05, "\n".join(lines)


def test_rows_are_what_is_launched(folder):
    """Kernel rows of a model and launches around it come to the time of a step."""
    plan = plan_of("llama32-1b", folder)
    for regime in plan.regimes:
        rows = sum(row.predicted_us for row in regime.kernels)
        around = sum(
            launch.predicted_us
            for group in regime.groups
            if group.name in STEP_GROUPS
            for launch in group.launches
        )
        launched = sum(
            launch.predicted_us * max(1, len(group.layers))
            for group in regime.groups
            for launch in group.launches
        )
        assert rows + around == pytest.approx(launched)
        (drawing,) = (group.launches for group in regime.groups if group.name == DRAW_GROUP)
        assert len(drawing) == 3
        greedy = launched - sum(launch.predicted_us for launch in drawing)
        if regime.kind == "decode":
            assert regime.predicted_us == pytest.approx(greedy)
        else:
            assert regime.predicted_us >= greedy * (1 - 1e-6)


def test_error_bars_are_the_last_residuals(folder):
    """Of a measured target; elsewhere they are the file's."""
    own = load_calibration("h200")
    assert own is not None
    plan = plan_of("llama32-1b", folder)
    bars = {name: item.error for name, item in plan.predictions.items()}
    assert bars["tpot_decode_1"] == pytest.approx(max(own.errors("tpot")), rel=0.01)
    assert bars["ttft_prefill_512"] == pytest.approx(max(own.errors("ttft")), rel=0.01)
    assert bars["cold_start"] == load_target("h200").prediction_error
    assert plan.target.ceilings["kernel_seconds"].source == own.parameters["kernel_seconds"].source
    other = plan_of("llama32-1b", folder, "h100")
    file = load_target("h100").prediction_error
    assert {item.error for item in other.predictions.values()} == {file}
    assert other.target.ceilings["read_share"].value == own.value("read_share")
    assert other.predictions["tpot_decode_1"].value > plan.predictions["tpot_decode_1"].value


def test_ranks_wait_for_each_other(folder):
    """Two ranks read half each, and every sum takes at least the latency of the link."""
    one = plan_of("llama3-8b", folder)
    two = plan_of("llama3-8b", folder, tp=2, devices=2)
    regime = next(r for r in two.stages[0].regimes if r.name == "decode_1")
    sums = [x for g in regime.groups for x in g.launches if x.template == "all_reduce"]
    assert sums and all(x.predicted_us > 2 for x in sums)
    names = [f"tpot_decode_{n}" for n in (1, 64)]
    for name in names:
        assert 0.5 < two.predictions[name].value / one.predictions[name].value < 0.85
