"""Which slices every rank of a stage has: one program, weights of each rank by its number.

`Shard` makes the graph of rank 0 and leaves a table of what the other ranks have in place of each
of its slices; later passes only join and pack slices, so that the table holds to the end.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx, nn

from sitsc.core.errors import GraphError
from sitsc.core.weights import TensorSlice, WeightSpec
from sitsc.passes.fxutil import set_weight, tensor

_META = "shards"


@dataclass(frozen=True, slots=True)
class ShardTable:
    """By the first slice of rank 0 the slices of all ranks."""

    num_ranks: int
    slices: dict[TensorSlice, tuple[tuple[TensorSlice, ...], ...]]

    @classmethod
    def of(cls, num_ranks: int, weights: Iterable[tuple[WeightSpec, ...]]) -> "ShardTable":
        """The table of cut weights, each given as the spec of every rank."""
        slices: dict[TensorSlice, tuple[tuple[TensorSlice, ...], ...]] = {}
        for ranks in weights:
            if len({spec.stored_shape for spec in ranks}) != 1:
                raise GraphError(f"the parts of {ranks[0].name} are not of one size")
            parts = tuple(spec.sources for spec in ranks)
            if slices.setdefault(ranks[0].sources[0], parts) != parts:
                raise GraphError(f"{ranks[0].name} is cut in two ways that begin alike")
        return cls(num_ranks, slices)

    def spec(self, spec: WeightSpec, rank: int) -> WeightSpec:
        """What rank `rank` has in place of a weight of rank 0."""
        found: list[TensorSlice] = []
        place = 0
        while place < len(spec.sources):
            parts = self.slices.get(spec.sources[place])
            if parts is None:
                found.append(spec.sources[place])
                place += 1
                continue
            if spec.sources[place : place + len(parts[0])] != parts[0]:
                raise GraphError(f"{spec.name} was cut again after sharding")
            found += parts[rank]
            place += len(parts[0])
        return replace(spec, sources=tuple(found))


def keep_table(graph: fx.Graph, table: ShardTable) -> None:
    """Leave the table with the graph."""
    graph.output_node().meta[_META] = table


def shard_table(graph: fx.Graph) -> ShardTable:
    """The table of a graph; that of one rank for a graph that is not sharded."""
    return graph.output_node().meta.get(_META) or ShardTable(1, {})


def weights_of_rank(graph: fx.Graph, tp_rank: int) -> tuple[WeightSpec, ...]:
    """Every weight buffer that a rank of the stage reads, by name; sizes are alike on all ranks."""
    table = shard_table(graph)
    specs = [table.spec(n.meta["weight"], tp_rank) for n in graph.nodes if "weight" in n.meta]
    return tuple(sorted(specs, key=lambda spec: spec.name))


def graph_of_rank(graph: fx.Graph, tp_rank: int) -> fx.Graph:
    """A copy of the graph with the weights of a rank; only for running graphs."""
    table = shard_table(graph)
    made = fx.GraphModule(nn.Module(), copy.deepcopy(graph)).graph
    for node in made.nodes:
        if node.op == "placeholder" and "weight" in node.meta:
            set_weight(node, table.spec(node.meta["weight"], tp_rank), tensor(node))
    return made
