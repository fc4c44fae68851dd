"""Plans of several ranks: stages end where predicted times are even, not where layer counts are."""

from pathlib import Path
from typing import Any

import pytest

from sitsc.core.errors import OptionError, PartitionError
from sitsc.core.hardware import load_target, target_names
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Parallel, Tokens
from sitsc.models.random_checkpoint import write_random
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.planner import ModelFacts
from sitsc.passes.runner import run_passes
from sitsc.pipeline import inspect, plan_checkpoint
from sitsc.rank_lowering import check_host, choose_parallel, record_of_graph
from tests.compiled_families import FAMILIES

CONTEXT = PassContext("float32", "none", "float32", 16, "cpu")


def bounds(traced: Any, **options: Any) -> tuple[int, ...]:
    changes = options.pop("changes", {})
    return parallel(traced, changes, **options).stages


def parallel(traced: Any, changes: dict[str, Any], target: str = "cpu", **options: Any) -> Parallel:
    config = FAMILIES["llama"] | {"num_hidden_layers": 6} | changes
    width = config["vocab_size"]
    facts = ModelFacts("Llama", "llama", {}, Tokens(width, width, None, False, (), 256))
    module = traced(config, "float32")
    run_passes(module, CPU, CONTEXT)
    asked = CompileOptions(target=target, **options)
    return choose_parallel(record_of_graph(module.graph, facts), asked, load_target(asked.target))


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers(traced: Any):
    first, middle, end = bounds(traced, pp=2, changes={"vocab_size": 16384})
    assert (first, end) == (0, 6)
    assert middle > 3


def test_one_stage_has_all_layers(traced: Any):
    assert bounds(traced, tp=2) == (0, 6)


def test_more_stages_than_layers_are_refused(traced: Any):
    with pytest.raises(PartitionError, match="PP 7"):
        bounds(traced, pp=7)


def test_devices_of_the_target_are_shared_as_the_cost_model_says(traced: Any):
    chosen = parallel(traced, {}, target="h200:2")
    assert chosen.tp * chosen.pp == 2
    assert chosen.dp == 1
    assert {(a.tp, a.pp, a.dp) for a in chosen.alternatives} >= {(1, 1, 2)}
    assert chosen.cuts[0].high_tokens == 256


def test_a_limit_changes_the_choice(traced: Any):
    with pytest.raises(PartitionError, match="the nearest is"):
        parallel(traced, {}, target="h200:2", slo="ttft=0.0001,tpot=0.0001")


def test_devices_and_ranks_that_disagree_are_refused():
    with pytest.raises(OptionError, match="4 ranks, not the 2 devices"):
        CompileOptions(target="h200:2", tp=2, pp=2)
    with pytest.raises(OptionError, match="'x' is no number"):
        CompileOptions(target="h200:x")
    with pytest.raises(OptionError, match="choose how several devices"):
        CompileOptions(target="h200", slo="ttft=100")


def test_more_devices_than_a_host_has_are_refused(tmp_path: Path):
    """Before anything is traced, naming what ranks partitions over several hosts."""
    folder = write_random("tiny-qwen2", tmp_path / "model", headers_only=True)
    for more in ({"target": "h200:16"}, {"target": "h200", "tp": 4, "pp": 3}):
        options = CompileOptions(**more)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match=r"(16|12) h200 are more than the 8 of one host") as e:
            plan_checkpoint(inspect(folder, options), options)
        assert "sitsc partition" in str(e.value) and "--nodes 2" in str(e.value)
        assert "\n" not in str(e.value)
    for name in target_names():
        data = load_target(name)
        check_host(data.host.devices or 1024, data)
        assert data.host.devices == 0 or "devices:" in data.host.source
    with pytest.raises(OptionError, match=r"11 l40s .* --nodes 11"):
        check_host(11, load_target("l40s"))
