"""Plans of several ranks: stages end where predicted times are even, not where layer counts are."""

from typing import Any

import pytest

from sitsc.core.errors import PartitionError
from sitsc.core.hardware import load_target
from sitsc.core.parallel import Partition
from sitsc.core.plan import Tokens
from sitsc.passes import CPU
from sitsc.passes.base import PassContext
from sitsc.passes.planner import ModelFacts
from sitsc.rank_lowering import bounds_by_time
from tests.compiled_families import FAMILIES

CONTEXT = PassContext("float32", "none", "float32", 16, "cpu")


def bounds(traced: Any, partition: Partition, **changes: int) -> tuple[int, ...]:
    config = FAMILIES["llama"] | {"num_hidden_layers": 6} | changes
    width = config["vocab_size"]
    facts = ModelFacts("Llama", "llama", {}, Tokens(width, width, None, False, (), 256))
    module = traced(config, "float32")
    return bounds_by_time(module, facts, partition, CPU, CONTEXT, load_target("cpu"))


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers(traced: Any):
    first, middle, end = bounds(traced, Partition(pp=2), vocab_size=16384)
    assert (first, end) == (0, 6)
    assert middle > 3


def test_one_stage_has_all_layers(traced: Any):
    assert bounds(traced, Partition(tp=2)) == (0, 6)


def test_more_stages_than_layers_are_refused(traced: Any):
    with pytest.raises(PartitionError, match="PP 7"):
        bounds(traced, Partition(pp=7))
