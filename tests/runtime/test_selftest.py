"""The self-test's logic without a GPU: which steps it makes, what it computes, how it judges."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.commands.verify import finding_lines
from sitsc.core.interpret import RandomTensors, run_graph, step_inputs
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Memory, Plan
from sitsc.core.reference import read_reference, reference_value
from sitsc.core.weights import materialise
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import Planned, inspect, plan_checkpoint
from sitsc.runtime.selftest_findings import (
    DeviceBytes,
    Finding,
    failures,
    memory_findings,
    summary,
)
from sitsc.runtime.selftest_kernels import check_layers, layered_pool
from sitsc.runtime.selftest_reference import (
    choose_lengths,
    expected,
    make_texts,
    row_errors,
)
from sitsc.runtime.selftest_steps import StepRunner, prefill_choice, prefill_parts


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    root = write_random("tiny-llama", tmp_path_factory.mktemp("selftest") / "model")
    options = CompileOptions(target="h200", max_batch=8, kv_tokens=4096)
    return plan_checkpoint(inspect(root, options), options)


def shaped(plan: Plan, batch: int, pages: int, context: int, buckets: tuple[int, ...]) -> Plan:
    return replace(
        plan,
        tokens=replace(plan.tokens, max_context=context),
        memory=replace(plan.memory, kv_pages=pages),
        schedule=replace(plan.schedule, max_batch=batch, prefill_buckets=buckets),
    )


def weights_of(planned: Planned) -> dict[str, torch.Tensor]:
    """Seeded random weights of the plan."""
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in planned.plan.model.parameters:
        for part in spec.sources:
            shapes[part.tensor] = (part.stop, *spec.shape[1:])
    tensors = RandomTensors(shapes)
    return {s.name: materialise(s, tensors.read) for s in planned.plan.model.parameters}


@settings(max_examples=200)
@given(
    st.integers(1, 300),
    st.integers(1, 3000),
    st.integers(6, 9000),
    st.lists(st.integers(16, 8192), min_size=1, max_size=4, unique=True),
)
def test_prompts_fit_the_plan(planned, batch, pages, context, buckets):
    page = planned.plan.kv[0].page_tokens
    plan = shaped(planned.plan, batch, max(pages, -(-context // page)), context, tuple(buckets))
    lengths = choose_lengths(plan)
    assert 1 <= len(lengths) <= batch and min(lengths) >= 1
    assert max(lengths) + 4 <= context or lengths == [1]
    assert sum(-(-(n + 4) // page) for n in lengths) <= plan.memory.kv_pages
    if plan.memory.kv_pages * page > batch * (context + page) and len(buckets) > 1:
        below = sorted(buckets)[-2]
        assert sum(lengths) > below or max(lengths) + 4 == context
    texts = make_texts(plan, lengths)
    used = [p for table in texts.tables for p in table]
    assert len(used) == len(set(used)) and texts.prompts == lengths


@settings(max_examples=200)
@given(
    st.integers(0, 500),
    st.integers(1, 2000),
    st.integers(1, 20),
    st.lists(st.integers(1, 300), min_size=1, max_size=30),
)
def test_a_prefill_step_lands_in_its_bucket(below, more, sequences, lengths):
    chosen = prefill_choice(below, below + more, sequences, lengths)
    assert len(chosen) == len(set(chosen)) <= sequences
    if chosen:
        assert below < sum(lengths[i] for i in chosen) <= below + more


def test_prefills_are_split_as_the_plan_allows(planned):
    plan = planned.plan
    largest = max(r.sizes["tokens"] for r in plan.regimes if r.kind == "prefill")
    lengths = [largest, 1, largest - 1, 2, *[1] * 30]
    parts = prefill_parts(plan, lengths)
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    assert parts[0] == [0] and parts[1] == [1, 2]
    assert all(sum(lengths[i] for i in part) <= largest for part in parts)
    assert all(len(part) <= plan.schedule.max_batch for part in parts)


def test_the_reference_gives_each_sequence_its_own_answer(planned):
    """All sequences at once, against the final graph over each alone; noise is rounding's size."""
    reference, plan = read_reference(reference_value(planned.graph)), planned.plan
    shapes: dict[str, tuple[int, ...]] = {}
    for spec in plan.model.parameters:
        for part in spec.sources:
            shapes[part.tensor] = (part.stop, *spec.shape[1:])
    tensors = RandomTensors(shapes)
    weights = {spec.name: materialise(spec, tensors.read) for spec in plan.model.parameters}
    texts = make_texts(plan, [9, 1, 70])
    want = expected(plan, reference, weights, texts)
    assert want.logits.shape == (3, 2, plan.tokens.logits_width)
    for index, ids in enumerate(texts.ids):
        inputs = step_inputs(planned.graph, list(ids), plan.kv[0].page_tokens)
        alone = run_graph(planned.graph, tensors, inputs)[-2:]
        assert float(row_errors(want.logits[index], alone).max()) < 1e-2
    moved = expected(plan, reference, weights, texts, disturbed=True)
    noise = float(row_errors(moved.logits, want.logits).max())
    assert 1e-3 < noise < 5e-2
    assert want.kept == (0, 2) and set(want.keys_values) == {("kv_0", 0), ("kv_0", 1)}
    keys, values = want.keys_values["kv_0", 0][0]
    assert keys.shape == values.shape == (10, plan.kv[0].kv_heads, plan.kv[0].head_dim)


def test_the_first_layer_that_differs_is_named(planned):
    """Pools that hold what the reference says, then with one layer or one token of it spoilt."""
    plan, group = planned.plan, planned.plan.kv[0]
    reference = read_reference(reference_value(planned.graph))
    weights = weights_of(planned)
    texts = make_texts(plan, [9, 1, 70])
    want = expected(plan, reference, weights, texts)
    moved = expected(plan, reference, weights, texts, disturbed=True)
    pools = {group.name: torch.full((plan.memory.kv_pages * group.page_bytes,), 0xFF).byte()}
    executor = SimpleNamespace(memory=SimpleNamespace(pools=pools))
    runner = StepRunner(executor, plan)
    pool = layered_pool(runner, group)
    for (_, place), kept in want.keys_values.items():
        for index, sides in zip(want.kept, kept, strict=True):
            for token in range(len(sides[0])):
                page, slot = divmod(token, group.page_tokens)
                for which, side in enumerate(sides):
                    pool[place, texts.tables[index][page], which, :, slot] = side[token]

    def judged(decoded: int) -> Finding:
        (found,) = check_layers(runner, texts, want, moved, "step", decoded)
        return found

    assert judged(0).passed and judged(3).passed and judged(1).passed
    page, slot = divmod(70, group.page_tokens)
    pool[1, texts.tables[2][page], 0, 1, slot] *= 1.5
    assert judged(0).passed and judged(2).passed and not judged(3).passed
    assert "layer 1 is the first" in judged(3).note
    pool[0, texts.tables[0][0], 1, :, 4] = float("nan")
    assert "layer 0 is the first" in judged(0).note


def test_row_errors_see_what_is_not_finite():
    wanted = torch.ones(3, 4)
    value = wanted.clone()
    value[1, 2] = float("nan")
    value[2] *= 1.5
    assert row_errors(value, wanted).tolist() == [0.0, float("inf"), 0.5]


# --- judgement ----------------------------------------------------------------------------------


def memory(weights: int, arena: int, kv: int, graphs: int, plan: Plan) -> Memory:
    total = weights + arena + kv + graphs
    return replace(
        plan.memory,
        weights_bytes=weights,
        arena_bytes=arena,
        kv_bytes=kv,
        graph_bytes=graphs,
        slack_bytes=0,
        package_bytes=0,
        total_bytes=total,
    )


@pytest.mark.parametrize(
    ("used", "peak", "wrong"),
    [
        (1000, 1000, []),
        (1019, 900, []),
        (1021, 1000, ["device"]),
        (985, 985, []),
        (880, 1000, []),
        (870, 1000, ["device"]),
        (1000, 1100, ["peak"]),
    ],
)
def test_bytes_in_use_are_those_of_the_plan(planned, used, peak, wrong):
    plan = memory(500, 100, 300, 100, planned.plan)
    findings = memory_findings(plan, DeviceBytes(500, 100, 300, used, peak))
    assert [finding.name for finding in failures(findings)] == wrong


def test_each_class_of_memory_is_judged(planned):
    plan = memory(500, 100, 300, 100, planned.plan)
    findings = memory_findings(plan, DeviceBytes(450, 103, 300, 1000, 1000))
    assert [finding.name for finding in failures(findings)] == ["weights", "arena"]
    assert findings[0].figures["difference"] == pytest.approx(-0.1)
    assert "450 bytes are allocated, 500 are planned" in findings[0].note


def test_one_line_says_what_is_wrong():
    good = Finding("graph", "decode_1", True, {"rows": 1})
    bad = Finding("kernels", "decode_8", False, {"worst_error": 0.25}, "relative error 0.25")
    unsure = Finding("kernels", "prefill_8192", None, {}, "no step was that large")
    assert summary([good, unsure]) == "1 checks passed, 1 not judged"
    assert summary([good, bad]) == "kernels decode_8: relative error 0.25"
    assert summary([good, bad, bad]).endswith("(and 1 more)")
    lines = finding_lines([good, bad, unsure])
    assert "pass" in lines[2] and "FAIL" in lines[3] and "open" in lines[4]
    assert "worst_error 2.50e-01; relative error 0.25" in lines[3]
