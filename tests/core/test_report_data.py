"""What reports show, as plain data: held against the plan that it is made from."""

import dataclasses
from pathlib import Path

import pytest

from sitsc.core.diff.read import open_plan, read_text
from sitsc.core.diff.view import programs
from sitsc.core.errors import OptionError
from sitsc.core.plan import DRAW_GROUP, Plan
from sitsc.core.report.kinds import KINDS, NORM, PACKAGE, kind_of_class, kind_of_operator
from sitsc.core.report.memory_map import FREE, arena, devices
from sitsc.core.report.roofline import points, roof
from sitsc.core.report.steps import lane_title, lanes, regime_names

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
GPU, TWO, STAGES, CPU = (
    "llama3-8b.h200",
    "llama3-8b.h200x2",
    "smollm2-135m.h200x2",
    "smollm2-135m.cpu",
)


def plan(name: str) -> Plan:
    return open_plan(ROOT / "plans" / f"{name}.json.xz").plan


@pytest.fixture(scope="module", params=[GPU, TWO, STAGES, CPU])
def each(request: pytest.FixtureRequest) -> Plan:
    return plan(request.param)


def test_steps_take_what_their_regimes_are_predicted_to(each: Plan):
    for name in regime_names(each):
        found = lanes(each, name)
        assert len(found) == len(programs(each))
        start = 0.0
        for lane, program in zip(found, programs(each), strict=True):
            regime = next(r for r in program.regimes if r.name == name)
            assert lane.start_us == pytest.approx(start)
            assert lane.us + lane.waits_us == pytest.approx(regime.predicted_us, rel=1e-4)
            start += regime.predicted_us
            greedy = [g for g in regime.groups if g.name != DRAW_GROUP]
            launched = sum(max(1, len(g.layers)) * len(g.launches) for g in greedy)
            shown = sum(block.times * len(block.segments) for block in lane.blocks)
            assert lane.packaged or shown == launched
            for block in lane.blocks:
                assert {segment.kind for segment in block.segments} <= set(KINDS)


def test_points_are_all_kernel_rows(each: Plan):
    found = roof(each)
    assert found is not None
    for name in regime_names(each):
        rows = [r for p in programs(each) for g in p.regimes if g.name == name for r in g.kernels]
        shown = points(each, name)
        for field in ("count", "bytes", "flops", "predicted_us"):
            of_point = "us" if field == "predicted_us" else field
            total = sum(getattr(point, of_point) for point in shown)
            assert total == pytest.approx(sum(getattr(row, field) for row in rows))
        assert [point.us for point in shown] == sorted((p.us for p in shown), reverse=True)
        assert all(found.share(point) <= 1.001 for point in shown)


def test_no_prediction_is_above_the_ceilings_of_int8():
    found = read_text((GOLDEN / "plan_tiny-llama_int8.json").read_text(), "int8").plan
    limits = roof(found)
    assert limits is not None and "int8" in limits.dtypes
    for name in regime_names(found):
        assert all(limits.share(point) <= 1.001 for point in points(found, name))


def test_the_roof_turns_at_the_ridge():
    found = roof(plan(GPU))
    assert found is not None and found.dtype == "bfloat16"
    assert found.limit(found.ridge * 0.99) == "memory" and found.limit(found.ridge) == "compute"
    point = next(p for p in points(plan(GPU), "decode_1") if p.name == "lm_head")
    assert point.flops_per_s == pytest.approx(point.bytes_per_s * point.intensity)
    bare = plan(GPU)
    bare = dataclasses.replace(bare, target=dataclasses.replace(bare.target, ceilings={}))
    assert roof(bare) is None


def test_parts_of_a_device_are_all_of_it(each: Plan):
    for device, program in zip(devices(each), programs(each), strict=True):
        planned = [part for part in device.parts if part.name != FREE]
        assert sum(part.bytes for part in planned) == program.memory.total_bytes
        assert device.all_bytes == (each.target.memory_bytes or program.memory.total_bytes)


def test_buffers_of_a_step_do_not_overlap(each: Plan):
    for name in regime_names(each):
        for stage, program in enumerate(programs(each)):
            found = arena(each, name, stage)
            assert found.end <= program.memory.arena_bytes
            for index, one in enumerate(found.moving):
                for other in (*found.kept, *found.moving[:index]):
                    apart = one.offset + one.bytes <= other.offset
                    apart |= other.offset + other.bytes <= one.offset
                    always = other in found.kept
                    together = always or (one.first <= other.last and other.first <= one.last)
                    assert apart or not together, (one, other)
            for span in found.spans:
                assert 0 <= span.low < span.high <= found.steps


def test_every_template_of_a_gpu_has_a_kind():
    """Elementwise is what is left: only what is no product, attention, expert or collective."""
    helpers = {"macros", "attention_parts", "skinny_parts", "sample_parts", "ranks"}
    files = (ROOT / "codegen" / "templates").glob("cuda_*.py.j2")
    names = {f.name.removeprefix("cuda_").removesuffix(".py.j2") for f in files} - helpers
    left = {name for name in names if kind_of_class(name) == NORM}
    assert left == {"glu", "pointwise", "rms_norm", "rope_table", "row_norm"}
    assert kind_of_class("aotinductor") == PACKAGE and kind_of_class("library") == "linear"
    assert kind_of_operator("sitsc.all_reduce") == "between ranks"
    assert kind_of_operator("aten.cat") == NORM


def test_regimes_to_show():
    found = plan(GPU)
    assert regime_names(found) == ["decode_1", "decode_8", "prefill_520"]
    assert regime_names(found, ("decode_4", "decode_4")) == ["decode_4"]
    with pytest.raises(OptionError, match="no regime 'decode_3'") as error:
        regime_names(found, ("decode_3",))
    assert "decode_1, decode_2" in error.value.hint


def test_titles_of_lanes():
    assert [lane_title(plan(GPU), lane) for lane in lanes(plan(GPU), "decode_1")] == ["whole step"]
    two = plan(TWO)
    assert [lane_title(two, lane) for lane in lanes(two, "decode_1")] == [
        "stage 0: layers 0-31, ranks 0-1"
    ]
