"""The passes of pipeline stages: a target's tuple with the cut and the sharding put in.

In: the traced graph, a partition and where stages begin. Out: one graph a stage, which all ranks of
the stage run, each with the weights that `weights_of_rank` gives.
"""

import copy
from pathlib import Path

from torch import fx, nn

from sitsc.core.parallel import Partition, check_partition, check_stages
from sitsc.passes.base import Pass, PassContext
from sitsc.passes.page_attention import PageAttention
from sitsc.passes.runner import run_passes
from sitsc.passes.shard import Shard
from sitsc.passes.shard_facts import divisible
from sitsc.passes.stages import CutStage

_BEFORE = "lower_linear"


def stage_passes(
    passes: tuple[Pass, ...], partition: Partition, stage: int, bounds: tuple[int, ...]
) -> tuple[Pass, ...]:
    """`passes` for the ranks of one stage; `bounds` as in CutStage."""
    found: list[Pass] = []
    for item in passes:
        if isinstance(item, PageAttention) and partition.pp > 1:
            found.append(CutStage(bounds, stage))
        if item.name == _BEFORE and partition.tp > 1:
            found.append(Shard(partition))
        found.append(item)
    return tuple(found)


def stage_graphs(
    module: fx.GraphModule,
    passes: tuple[Pass, ...],
    partition: Partition,
    bounds: tuple[int, ...],
    context: PassContext,
    dump: Path | None = None,
) -> list[fx.GraphModule]:
    """The final graph of each stage; `module` is the traced one, which is changed.

    What comes before the cut runs once. `dump`: texts go to a folder of its own for each stage.
    Raises PartitionError for what does not divide.
    """
    at = next(i for i, item in enumerate(passes) if isinstance(item, PageAttention))
    run_passes(module, passes[:at], context, dump=dump)
    facts = divisible(module.graph)
    check_partition(partition, facts)
    check_stages(bounds, facts.num_layers)
    found = []
    for stage in range(partition.pp):
        part = fx.GraphModule(nn.Module(), copy.deepcopy(module.graph))
        folder = None if dump is None else dump / f"stage_{stage}"
        rest = stage_passes(passes[at:], partition, stage, bounds)
        run_passes(part, rest, context, dump=folder)
        found.append(part)
    return found
