"""Sharding of every family: ranks together compute what one does, with as few operators."""

from typing import Any

import pytest
from compiled_families import FAMILIES
from sharding import COLLECTIVES, LOOKUP, Model, op_counts

from sitsc.core.interpret import relative_error
from sitsc.core.parallel import Partition, check_partition
from sitsc.passes.shard import gathers
from sitsc.passes.shard_facts import divisible

TOLERANCE = 1e-5
EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "deepseek_v3")
PARTITIONS = (Partition(tp=2), Partition(pp=2), Partition(tp=2, pp=2), Partition(tp=4))
OF_EXPERTS = (Partition(tp=2, ep=2), Partition(tp=4, ep=2), Partition(tp=4, ep=4, pp=2))


def _partitions(family: str) -> tuple[Partition, ...]:
    return PARTITIONS + (OF_EXPERTS if family in EXPERTS else ())


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_compute_what_one_does(family: str, traced: Any):
    model = Model(traced(FAMILIES[family], "float32"))
    for partition in _partitions(family):
        check_partition(partition, divisible(model.whole))
        stages = model.stages(partition)
        error = relative_error(model.result(stages, partition.tp), model.wanted)
        assert error < TOLERANCE, (partition.text(), error)
        assert not any(map(gathers, stages)), partition.text()
        if partition.pp == 1 and partition.ep == 1:
            _has_no_more_operators(model, stages[0], family, partition.tp)


def _has_no_more_operators(model: Model, graph: Any, family: str, tp: int) -> None:
    """Besides collectives and the lookup of a part of the table; OLMo-2's norm is written out."""
    more = op_counts(graph)
    for name in COLLECTIVES:
        del more[name]
    more.subtract(LOOKUP)
    more.subtract(op_counts(model.whole))
    if family == "olmo2":
        more -= +more
    elif tp == 4 and "glu" in more:  # 24 rows of a gate are no whole blocks
        more -= +more
    assert not +more, +more


def test_collectives_of_a_layer(traced: Any):
    """Two sums a layer, one in parallel blocks; one for the table and one gather of the logits."""
    for family, layer in (("llama", 2), ("cohere", 1), ("gpt_neox", 1), ("qwen2_moe", 2)):
        model = Model(traced(FAMILIES[family], "float32"))
        counts = op_counts(*model.stages(Partition(tp=2)))
        assert (counts["all_reduce"], counts["all_gather"]) == (2 * layer + 1, 1), family
