"""The passes of one pipeline stage: a target's tuple with the cut and the sharding put in."""

from sitsc.core.parallel import Partition
from sitsc.passes.base import Pass
from sitsc.passes.page_attention import PageAttention
from sitsc.passes.shard import Shard
from sitsc.passes.stages import CutStage

_BEFORE = "lower_linear"


def stage_passes(
    passes: tuple[Pass, ...], partition: Partition, stage: int, bounds: tuple[int, ...]
) -> tuple[Pass, ...]:
    """`passes` for the ranks of one stage; `bounds` as in CutStage.

    All ranks of the stage run what comes out, with the weights of `weights_of_rank`.
    """
    found: list[Pass] = []
    for item in passes:
        if isinstance(item, PageAttention) and partition.pp > 1:
            found.append(CutStage(bounds, stage))
        if item.name == _BEFORE and partition.tp > 1:
            found.append(Shard(partition))
        found.append(item)
    return tuple(found)
