"""Buckets of a GPU for any number of sequences, and what each says of its rows and graphs."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.commands.plan_rows import table_rows
from sitsc.commands.plan_view import plan_lines
from sitsc.core.diff.kernels import kernels
from sitsc.core.options import CompileOptions
from sitsc.core.plan import DRAW_GROUP, Plan
from sitsc.models.presets import preset
from sitsc.models.random_checkpoint import write_random
from sitsc.passes.cuda_planner import cuda_buckets
from sitsc.pipeline import inspect, plan_checkpoint

GRAPH = 6 << 20


@given(st.integers(1, 1024), st.integers(16, 8192), st.integers(2, 1 << 17))
def test_buckets_hold_the_largest_batch(most: int, chunk: int, context: int) -> None:
    """Every number of sequences has a decode bucket, and few rows above 256 are left idle."""
    options = CompileOptions(target="h200", max_batch=most, prefill_chunk_tokens=chunk)
    steps = cuda_buckets(options, context)
    decode = [step.sequences for step in steps if step.kind == "decode"]
    assert decode == sorted(set(decode)) and decode[-1] == most
    assert all(b - a <= 128 for a, b in pairwise(decode))
    largest = steps[-1]
    assert (largest.kind, largest.sequences) == ("prefill", most)
    assert largest.tokens == min(chunk, context) + most


def test_buckets_above_256() -> None:
    decode = {n: _decode(n) for n in (256, 257, 300, 384, 400, 1024)}
    assert decode[256][-2:] == [192, 256] and decode[257][-2:] == [256, 257]
    assert decode[300][-2:] == [256, 300] and decode[384][-2:] == [256, 384]
    assert decode[400][-3:] == [256, 384, 400] and decode[1024][-2:] == [896, 1024]


def _decode(most: int) -> list[int]:
    options = CompileOptions(target="h200", max_batch=most)
    return [step.tokens for step in cuda_buckets(options, 4096) if step.kind == "decode"]


# --- plans --------------------------------------------------------------------------------------


def _plan(folder: Path, **more: Any) -> Plan:
    if not folder.exists():
        write_random(preset("llama32-1b") | {"num_hidden_layers": 2}, folder, headers_only=True)
    options = CompileOptions(target="h200", **more)
    return plan_checkpoint(inspect(folder, options), options).plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans") / "llama32-1b"


@pytest.fixture(scope="module")
def plan(folder: Path) -> Plan:
    return _plan(folder)


@pytest.fixture(scope="module")
def stages(folder: Path) -> Plan:
    return _plan(folder, pp=2, devices=2)


def test_graphs_are_those_of_the_decode_buckets(plan: Plan, stages: Plan) -> None:
    """Two of a bucket that samples, one of a bucket of an earlier stage."""
    assert plan.memory.graph_bytes == 2 * len(plan.schedule.decode_buckets) * GRAPH
    first, last = (stage.memory.graph_bytes for stage in stages.stages)
    count = len(stages.schedule.decode_buckets)
    assert (first, last) == (count * GRAPH, 2 * count * GRAPH)


def test_large_batches_are_planned(folder: Path) -> None:
    plan = _plan(folder, max_batch=300)
    assert plan.schedule.decode_buckets[-2:] == (256, 300)
    assert plan.memory.graph_bytes == 2 * 13 * GRAPH
    regime = next(regime for regime in plan.regimes if regime.name == "decode_300")
    launches = [x for group in regime.groups for x in group.launches]
    assert any(x.kind == "library" for x in launches)


def test_rows_name_what_is_launched(plan: Plan) -> None:
    """Each template of a regime in the rows of its table; decode rows need no selection."""
    for regime in plan.regimes:
        rows = {(row.name, row.op): row.by for row in regime.kernels}
        names = {name for row in table_rows(regime) for name in row.by.split(" + ")}
        for group in regime.groups:
            if group.name != DRAW_GROUP:
                found = {x.template or f"library {x.kernel}" for x in group.launches}
                assert found <= names, regime.name
        silent = [row for row in regime.kernels if not row.predicted_us]
        assert all(row.by == "no launch" or row.by.startswith("inside of ") for row in silent)
        by = rows["logit_rows", "aten.index.Tensor"]
        assert by == ("no launch" if regime.kind == "decode" else "gather")
        assert not any(name != "logit_rows" for name, op in rows if op == "aten.index.Tensor")


def test_tables_add_up_to_the_step(plan: Plan, stages: Plan) -> None:
    """With the sampling and, in short prefill steps, the wait for the host."""
    regimes = [*plan.regimes, *(r for stage in stages.stages for r in stage.regimes)]
    for regime in regimes:
        rows = table_rows(regime)
        total = sum(row.predicted_us for row in rows)
        assert total == pytest.approx(regime.predicted_us, rel=1e-5), regime.name
    short = next(regime for regime in plan.regimes if regime.name == "prefill_128")
    (waiting,) = (row for row in table_rows(short) if row.name == "waiting for the host")
    assert waiting.predicted_us > 0


def test_the_view_has_no_empty_lines_of_facts(plan: Plan) -> None:
    lines = plan_lines(plan)
    assert not any(line.startswith("packages") for line in lines)
    assert any("attention_decode + attention_reduce" in line for line in lines)


def test_values_that_need_no_launch_say_where_they_are_computed(folder: Path) -> None:
    """The sums over ranks are in the next norm's kernel, before the layer that reads it."""
    plan = _plan(folder, tp=2, devices=2)
    regime = next(r for r in plan.stages[0].regimes if r.name == "decode_1")
    sums = {row.by for row in regime.kernels if row.op == "sitsc.all_reduce"}
    names = ("self_attn.q_proj+k_proj+v_proj", "mlp.gate_proj+up_proj", "lm_head")
    assert sums and sums <= {f"inside of {name}" for name in names}
    readers = [row for row in regime.kernels if row.name in names]
    assert all(row.by.startswith("all_reduce + ") for row in readers)


def test_other_launches_are_told_as_launches_alone(plan: Plan) -> None:
    """That another kind of code computes an operator is a change, another kernel's name is none."""

    def by(text: str) -> Plan:
        rows = [tuple(replace(row, by=text) for row in r.kernels) for r in plan.regimes]
        regimes = zip(plan.regimes, rows, strict=True)
        return replace(plan, regimes=tuple(replace(r, kernels=made) for r, made in regimes))

    assert not list(kernels(plan, by("gemv + attention_reduce")))
    changes = list(kernels(plan, by("inductor")))
    assert changes and all(change.title == "computed by" for change in changes)
