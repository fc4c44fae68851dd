"""`plan explain`: facts come from the plan, its graph and the tile table."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sitsc.cli import app
from sitsc.core import explain
from sitsc.core.errors import OptionError
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan
from sitsc.core.reference import Reference, read_reference, reference_value
from sitsc.core.tiles import TileTable, load_table
from sitsc.models.random_checkpoint import write_random
from sitsc.pipeline import Planned, inspect, plan_checkpoint


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    """The plan of a tiny model for a GPU."""
    folder = write_random("tiny-llama", tmp_path_factory.mktemp("model"), headers_only=True)
    options = CompileOptions(target="h200", max_batch=4)
    return plan_checkpoint(inspect(folder, options), options)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of two ranks, as the cost model cuts them."""
    folder = write_random("tiny-llama", tmp_path_factory.mktemp("model"), headers_only=True)
    options = CompileOptions(target="h200:2", max_batch=4)
    return plan_checkpoint(inspect(folder, options), options).plan


def graph(planned: Planned) -> Reference:
    return read_reference(json.loads(json.dumps(reference_value(planned.graph))))


def texts(facts: list[explain.Fact]) -> str:
    return "\n".join(f"{f.what} | {f.by} | {f.why} | {f.change}" for f in facts)


def test_an_mlp_names_the_passes_that_made_it(planned: Planned):
    found = texts(explain.operator_facts(planned.plan, graph(planned), "model.layers.0.mlp"))
    for name in ("merge_linears", "fuse_norm", "fuse_glu", "fuse_residual"):
        assert f"passes/{name}.py" in found
    assert "the rule of core/tiles.py" in found
    assert "decode_1 (" in found and "prefill_" in found


def test_attention_has_a_fact_for_each_of_its_kernels(planned: Planned):
    found = texts(explain.operator_facts(planned.plan, None, "model.layers.0.self_attn"))
    assert "attention: attention_decode" in found
    assert "attention: attention_prefill" in found
    assert "fuse_norm" not in found  # without the graph nothing is said of it


def test_what_is_not_tuned_does_not_ask_for_tuning(planned: Planned):
    (fact,) = explain.operator_facts(planned.plan, None, "model.embed_tokens")
    assert fact.by == "codegen/templates/cuda_gather.py.j2" and fact.change == ""


def test_a_measured_tile_shows_its_evidence(planned: Planned, monkeypatch: pytest.MonkeyPatch):
    launch = next(
        launch
        for group in planned.plan.regimes[0].groups
        for launch in group.launches
        if any(a.buffer.endswith("down_proj.weight") for a in launch.arguments)
    )
    entry = load_table("h200").linear[0]
    spec = next(
        w for w in planned.plan.model.parameters if w.name.endswith("0.mlp.down_proj.weight")
    )
    evidence = {"us": {"192": 1.25}, "library": 1.5, "date": "2026-01-02", "gpu": "a GPU"}
    rows, columns = spec.shape
    entry = replace(
        entry, rows=rows, columns=columns, low=1, high=1, kernel="gemv", tile=launch.tile,
        epilogue="residual", evidence=evidence,
    )  # fmt: skip
    monkeypatch.setattr(explain, "load_table", lambda name: TileTable((entry,)))
    found = texts(explain.operator_facts(planned.plan, None, "model.layers.0.mlp.down_proj"))
    assert "measured 2026-01-02 on a GPU: 1.25 µs at context 192" in found
    assert "takes 1.500 times as long" in found


def test_a_path_without_operators_is_refused(planned: Planned):
    with pytest.raises(OptionError, match="nothing of the plan is inside"):
        explain.operator_facts(planned.plan, None, "model.nowhere")


@pytest.mark.parametrize("topic", explain.TOPICS)
def test_every_topic_says_something_of_one_rank_and_of_two(
    planned: Planned, of_ranks: Plan, topic: str
):
    for plan in (planned.plan, of_ranks):
        facts = explain.why(plan, topic)
        assert facts and all(fact.what and fact.by and fact.why for fact in facts)


def test_the_partition_is_explained_by_what_was_not_chosen(of_ranks: Plan):
    found = texts(explain.why(of_ranks, explain.topic_of("tp")))
    chosen = of_ranks.parallel
    assert f"TP {chosen.tp} × PP {chosen.pp}" in found
    assert "not TP 1 × PP 1 × EP 1 × DP 2" in found
    assert "tokens/s" in found
    assert "asked for, or first by" in found and "predicted TPOT " in found
    assert "2 replicas would be artifacts of their own" in found and ": slower:" not in found


def test_the_command(planned: Planned, tmp_path: Path):
    file = tmp_path / "plan.json"
    file.write_text(planned.plan.text())

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["plan", "explain", str(file), *arguments])

    shown = run("--why", "memory")
    assert shown.exit_code == 0
    assert "weights" in shown.output and "changed by:" in shown.output
    values = json.loads(run("--op", "model.layers.0.mlp", "--json").output)
    assert {"what", "by", "why", "change"} == set(values[0])
    for wrong in ([], ["--op", "x", "--why", "tp"], ["--why", "weather"]):
        assert run(*wrong).exit_code != 0
