"""Comparing plans: what is read and what is refused, plans of several ranks, models and schemas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sitsc
from sitsc.core.canonical import canonical_json
from sitsc.core.diff.change import PlanDiff
from sitsc.core.diff.compare import compare
from sitsc.core.diff.read import open_plan, opened, read_text
from sitsc.core.errors import PlanError
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan, read_plan
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import inspect, plan_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
FLOAT = (GOLDEN / "plan_tiny-llama_float32.json").read_text()
INT8 = (GOLDEN / "plan_tiny-llama_int8.json").read_text()


def of_text(a: str, b: str) -> PlanDiff:
    return compare(read_text(a, "a.json"), read_text(b, "b.json"))


def edited(text: str = FLOAT, **changes: Any) -> str:
    return canonical_json(json.loads(text) | changes)


def sections(diff: PlanDiff) -> list[str]:
    return list(dict.fromkeys(change.section for change in diff.changes))


def test_a_plan_is_as_itself():
    found = of_text(FLOAT, FLOAT)
    assert found.empty and not found.skipped and not found.warnings
    assert found.a == replace(found.b, name="a.json")


def test_quantised_weights_are_decisions_and_figures():
    found = of_text(FLOAT, INT8)
    assert sections(found)[:2] == ["numerics", "model"]
    lines = [change.text for change in found.changes]
    assert "dtype: float32 → bfloat16" in lines and "weights: none → int8" in lines
    weights = next(f for f in found.figures if f.name == "memory.weights")
    assert weights.after < weights.before and weights.worse < 0


def test_the_other_way_round_is_the_mirror_image():
    one, other = of_text(FLOAT, INT8), of_text(INT8, FLOAT)
    assert {(c.title, c.before, c.after) for c in one.changes} == {
        (c.title.replace("gained", "lost"), c.after, c.before) for c in other.changes
    }
    assert [(f.before, f.after) for f in one.figures] == [
        (f.after, f.before) for f in other.figures
    ]


def test_predictions_within_the_error_bar_are_warned_of():
    plan = read_plan(FLOAT)
    regime = plan.regimes[0]
    name = f"tpot_{regime.name}"
    slower = replace(regime, predicted_us=regime.predicted_us * 1.1)
    said = replace(plan.predictions[name], value=slower.predicted_us / 1e3)
    after = replace(
        plan, regimes=(slower, *plan.regimes[1:]), predictions=plan.predictions | {name: said}
    )
    found = compare(opened(plan, "a"), opened(after, "b"))
    assert [f.name for f in found.figures if f.within_error] == [name]
    bar = f"{100 * plan.predictions[name].error:.3g} %"
    assert f"smaller than the error bar (± {bar})" in found.warnings[0]


# --- several ranks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("diff") / "model"
    return write_random("tiny-llama", place, headers_only=True)


def planned(folder: Path, **options: Any) -> Plan:
    made = CompileOptions(max_batch=2, prefill_chunk_tokens=64, max_context=128, **options)
    return plan_checkpoint(inspect(folder, made), made).plan


@pytest.fixture(scope="module")
def staged(folder: Path) -> Plan:
    return planned(folder, tp=2, pp=2)


def test_plans_of_ranks_are_compared(folder: Path, staged: Plan):
    assert compare(opened(staged, "a"), opened(read_plan(staged.text()), "b")).empty
    one = planned(folder)
    found = compare(opened(one, "a"), opened(staged, "b"))
    texts = [change.text for change in found.changes]
    assert texts[0] == "partition: TP 1 PP 1 EP 1 DP 1, 1 rank → TP 2 PP 2 EP 1 DP 1, 4 ranks"
    assert "collectives: all_reduce in layers 1: 0 in each → 2 in each" in texts
    assert not [c for c in found.changes if c.section == "model"]  # tensors are stored as before
    weights = next(f for f in found.figures if f.name == "memory.weights")
    assert weights.after < weights.before


def test_a_figure_of_ranks_is_that_of_the_slowest_stage(staged: Plan):
    found = compare(opened(staged, "a"), opened(staged, "b"))
    rate = next(f for f in found.figures if f.name == "throughput").before
    slowest = max(r.predicted_us for s in staged.stages for r in s.regimes if r.name == "decode_2")
    assert rate == pytest.approx(2e6 / slowest, rel=1e-4)


# --- plain plans ----------------------------------------------------------------------------------


def test_plain_plans_are_compared_by_tensor(tmp_path: Path):
    for name, width in (("a", 16), ("b", 32)):
        torch.manual_seed(0)
        example = (torch.zeros(2, 16),)
        sitsc.compile(nn.Linear(16, width).eval(), example_inputs=example, out=tmp_path / name)
    a, b = open_plan(tmp_path / "a"), open_plan(tmp_path / "b")
    assert compare(a, a).empty
    found = compare(a, b)
    texts = [change.text for change in found.changes]
    assert "weights: weight: float32 n16 16×16 → float32 n16 32×16" in texts
    assert [f.group for f in found.figures if f.name == "plain"] == ["time of a call"]
    mixed = compare(a, read_text(FLOAT, "plan.json"))
    assert mixed.skipped["kernels"] == "A is a plain plan, B a decoder plan"


# --- other models and schemas ---------------------------------------------------------------------


def test_of_other_models_what_does_not_depend_on_layers_is_compared():
    model = json.loads(FLOAT)["model"] | {"architecture": "MixtralForCausalLM"}
    found = of_text(FLOAT, edited(model=model))
    assert found.changes[0].title == "different models"
    assert set(found.skipped) == {"model", "kv", "fusions", "kernels"}
    assert found.skipped["kernels"] == "A is LlamaForCausalLM, B MixtralForCausalLM"
    assert any(figure.name == "memory.total" for figure in found.figures)
    wider = json.loads(FLOAT)["model"]
    wider = wider | {"dimensions": wider["dimensions"] | {"hidden_size": 128}}
    found = of_text(FLOAT, edited(model=wider))
    assert found.skipped["fusions"] == "A and B have hidden_size 64 and 128"


def test_of_another_schema_the_sections_that_read_are_compared():
    value = json.loads(INT8)
    newer = canonical_json(value | {"schema": 2, "memory": value["memory"] | {"new_bytes": 1}})
    found = of_text(FLOAT, newer)
    assert found.changes[0].text == "different schemas: 1 → 2"
    assert set(found.skipped) == {"memory", "sizes"}
    assert found.skipped["memory"] == "memory: unknown key 'new_bytes' at memory in B"
    assert "numerics" in sections(found) and any(f.group == "TPOT" for f in found.figures)
    del value["model"]
    found = of_text(canonical_json(value | {"schema": 0}), FLOAT)
    assert "model" in found.skipped and found.a.model == "unknown"
    del value["target"], value["regimes"]
    found = of_text(FLOAT, canonical_json(value | {"schema": 0, "regimes": 1}))
    assert not found.warnings and found.b.target == "unknown"


def test_a_schema_of_which_nothing_reads_is_refused():
    with pytest.raises(PlanError, match="plan schema 9, this version reads 1, and no section"):
        read_text('{"schema": 9, "regimes": 1}', "new.json")


# --- damaged files --------------------------------------------------------------------------------


def changed(text: str, *path: Any, value: Any) -> str:
    """The text of a plan with one value replaced."""
    whole = json.loads(text)
    place = whole
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return canonical_json(whole)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (FLOAT[:-2000], "not JSON"),
        ("", "not JSON"),
        (FLOAT.replace('"schema": 1', '"schema": NaN'), "NaN is no number"),
        (FLOAT.replace('"schema": 1', '"schema": 1e999'), "1e999 is no number"),
        ("[]", "no plan in this file"),
        ('{"schema": true, "regimes": []}', "no plan in this file"),
        ('{"schema": 1}', "no plan in this file"),
        (FLOAT.replace('"schema": 1', '"schema":  1'), "not as sitsc writes it, from line"),
        (FLOAT.replace("\n", ""), "from line 1 on: edited by hand?"),
        (FLOAT + "\n", "not as sitsc writes it"),
        (edited(extra=1), "unknown key 'extra'"),
        (changed(FLOAT, "memory", "total_bytes", value=5), "memory comes to"),
        (changed(FLOAT, "memory", "kv_pages", value=1), "KV pages come to"),
        (changed(FLOAT, "predictions", "tpot_decode_1", "value", value=1e-9), "tpot_decode_1"),
        (changed(FLOAT, "schedule", "max_batch", value="8"), "expected int"),
    ],
)
def test_damaged_and_edited_plans_are_refused(text: str, words: str):
    with pytest.raises(PlanError) as caught:
        read_text(text, "bad.json")
    assert words in str(caught.value) and "bad.json" in str(caught.value) + caught.value.where
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "plan.json").write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match=r"plan\.json cannot be read"):
        open_plan(tmp_path / "plan.json")
