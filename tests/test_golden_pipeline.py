"""Choosing golden configurations: as `sitsc partition` ranks, and every figure from the model."""

from datetime import date

import pytest

from sitsc.core.errors import OptionError, PartitionError
from sitsc.core.options import CompileOptions
from sitsc.core.parallel import Partition
from sitsc.golden_data import data_digests
from sitsc.golden_pipeline import Day, Wish, options_of
from sitsc.golden_search import Choice, choices, rejected_of, search_configs
from sitsc.partition_pipeline import Slo, Workload
from sitsc.passes.loads import Load
from sitsc.passes.partition import Candidate, Search
from tests.partition_records import search

CONTEXT, PAGE = 8192, 64
MOST = 256
DENSE = "llama3-8b"


def found(name: str, devices: int, workload: Workload, slo: Slo) -> tuple[Search, Choice]:
    wish = Wish(CompileOptions(target=f"h200:{devices}"), workload, slo)
    on = search(name, devices)
    return on, search_configs(on, wish.asked, wish.stored, CONTEXT, PAGE)


def most_within(
    on: Search, workload: Workload, slo: Slo, ranked: tuple[Candidate, ...]
) -> tuple[Partition, Load]:
    """The load that is asked for; with limits the one with most tokens a second within them."""
    if slo == Slo() or workload.rate:
        return ranked[0].partition, ranked[0].load
    found = [
        (c.partition, load)
        for c in ranked
        for load in on.loads(c.partition, workload, on.most_batch(c.budget, workload))
        if slo.misses(load.ttft_ms, load.tpot_ms) <= 1
    ]
    return max(found, key=lambda pair: pair[1].tokens_per_s)


@pytest.mark.parametrize("slo", [Slo(), Slo(100, 8), Slo(ttft_ms=60)])
@pytest.mark.parametrize(
    "workload", [Workload(), Workload(512, 64, 8), Workload(300, 100, rate=20.0)]
)
@pytest.mark.parametrize(("name", "devices"), [(DENSE, 1), (DENSE, 4)])
def test_the_partition_is_the_one_that_sitsc_partition_puts_first(
    name: str, devices: int, workload: Workload, slo: Slo
):
    on = search(name, devices)
    ranked = on.run(devices, workload, slo, flips=False).ranked
    if not any(c.meets or c.holds for c in ranked):
        with pytest.raises(PartitionError, match="the nearest is"):
            found(name, devices, workload, slo)
        return
    _, choice = found(name, devices, workload, slo)
    best, (partition, load) = choice.best, most_within(on, workload, slo, ranked)
    if load.batch > MOST:  # more than a GPU has buckets for: others may be faster with fewer
        assert best.batch <= MOST
        return
    assert (best.partition, best.batch) == (partition, load.batch)
    step = on.replica(best.partition).decode(best.batch, workload.context)
    assert best.figures.tpot_ms == pytest.approx(step.us / 1e3)
    if not workload.rate:
        assert best.figures.tokens_per_s == pytest.approx(load.tokens_per_s, rel=0.011)


def test_figures_with_whole_prompts_are_those_of_the_partition():
    workload = Workload(2048, 256, 32)
    on, choice = found(DENSE, 2, workload, Slo())
    for candidate in on.run(2, workload, Slo(), flips=False).ranked:
        configs = (*choice.configs, *(c for c, _ in choice.as_fast))
        best = min(
            (c for c in configs if c.partition == candidate.partition),
            key=lambda c: c.figures.ttft_ms,
        )
        assert best.figures.ttft_ms == pytest.approx(candidate.ttft_ms)
        if candidate.partition.pp == 1:
            assert best.figures.loaded_tpot_ms == pytest.approx(candidate.load.tpot_ms)
            assert best.figures.tokens_per_s == pytest.approx(candidate.load.tokens_per_s)


def test_the_pool_holds_what_the_batch_needs():
    for slo in (Slo(), Slo(200, 10)):
        workload = Workload(3000, 500, 64)
        on, choice = found(DENSE, 1, workload, slo)
        assert choice.configs
        for config in choice.configs:
            budget = on.replica(config.partition).budget(
                on.usable, config.batch, config.chunk_tokens
            )
            assert max(CONTEXT, config.batch * 3500) <= config.kv_tokens <= budget.kv_tokens
            assert config.kv_tokens % PAGE == 0 and config.max_context == CONTEXT


def test_candidates_differ_in_what_matters():
    """One device: fewer sequences, another chunk. Several: another partition first."""
    _, choice = found(DENSE, 1, Workload(), Slo(200, 12))
    one, two, three = list(choices(choice))[:3]
    assert one == choice.best and two.batch < one.batch and two.chunk_tokens == one.chunk_tokens
    assert three.batch == one.batch and three.chunk_tokens != one.chunk_tokens
    assert all(c.figures.misses(choice.asked) <= 1 for c in choices(choice))
    names = [c.name for c in choices(choice)]
    assert len(set(names)) == len(names)
    _, choice = found(DENSE, 4, Workload(), Slo())
    one, two = list(choices(choice))[:2]
    assert (one.partition, two.partition) == choice.order[:2]


def test_others_have_a_reason():
    _, choice = found(DENSE, 3, Workload(), Slo(200, 12))
    names = [choice.best.name]
    rejected = {item.name: item for item in rejected_of(choice, names)}
    assert choice.best.name not in rejected and all(item.reason for item in rejected.values())
    assert "heads do not divide by TP 3" in rejected["TP 3"].reason
    reasons = " ".join(item.reason for item in rejected.values())
    assert "fewer tokens/s" in reasons and "times the limit" in reasons


def test_a_smaller_chunk_wins_where_it_costs_nothing():
    _, choice = found(DENSE, 1, Workload(2000, 16, 4), Slo())
    lost = dict(choice.as_fast)
    for config, smaller in lost.items():
        assert smaller < config.chunk_tokens and config not in choice.configs


def test_options_of_a_replica():
    _, choice = found(DENSE, 4, Workload(), Slo())
    config = choice.best
    made = options_of(config, CompileOptions(target="h200:4", max_context=CONTEXT))
    assert made.num_ranks == config.partition.tp * config.partition.pp == made.devices
    assert (made.max_batch, made.kv_tokens) == (config.batch, config.kv_tokens)


def test_data_files():
    own = data_digests("h200", 1)
    assert set(own) == {"targets/h200", "tiles/h200", "calibration/h200"}
    assert set(data_digests("h100", 2)) == {"targets/h100", "calibration/h200", "links/nvlink"}
    assert set(data_digests("cpu", 2)) == {"targets/cpu", "calibration/cpu", "links/gloo"}
    assert data_digests("h200", 2)["targets/h200"] == own["targets/h200"]


def test_days():
    assert Day(date(2026, 11, 30), 90).expires == date(2027, 2, 28)
    for days in (0, -1, 4000):
        with pytest.raises(OptionError, match=f"--expires-days {days}"):
            Day(date(2026, 11, 30), days)
