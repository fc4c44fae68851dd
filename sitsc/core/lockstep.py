"""Running the graphs of all ranks in one process, call by call together.

In: the graph of each stage, the weights of each of its ranks and a reader of checkpoint rows. Out:
the result of a step, which must be the same bits on every rank of a stage.
Collectives combine the values of the ranks as the operators do between processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from sitsc.core.errors import GraphError
from sitsc.core.interpret import call_node
from sitsc.core.ops.collectives import sum_of_ranks
from sitsc.core.weights import ReadRows, WeightSpec, materialise

_OPS = torch.ops.sitsc
Inputs = dict[str, Tensor]


def _collective(target: Any, args: list[tuple[Any, ...]]) -> list[Tensor] | None:
    """The results of all ranks of a collective, or None for any other operator."""
    parts = [one[0] for one in args]
    if target is _OPS.all_reduce.default:
        return [sum_of_ranks(parts, one[1]) for one in args]
    if target is _OPS.all_gather.default:
        return [torch.cat(parts, one[1]) for one in args]
    return None


@dataclass(slots=True)
class Stage:
    """One stage: its graph, and for each rank the weights that stand for those of the graph."""

    graph: fx.Graph
    ranks: Sequence[Mapping[str, WeightSpec]]
    read: ReadRows
    _weights: list[dict[fx.Node, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make every weight of every rank."""
        nodes = [n for n in self.graph.nodes if n.op == "placeholder" and "weight" in n.meta]
        for specs in self.ranks:
            made = {n: materialise(specs[n.meta["weight"].name], self.read) for n in nodes}
            self._weights.append(made)

    def run(self, inputs: Sequence[Inputs]) -> list[Tensor]:
        """The results of one step; `inputs` are those of each rank. Raises GraphError."""
        values: list[dict[fx.Node, Any]] = []
        for rank, weights in enumerate(self._weights):
            given = inputs[rank] | {"tp_rank": torch.tensor([rank])}
            values.append({**weights, **{n: given[n.meta["input"]] for n in self._inputs()}})
        for node in self.graph.nodes:
            if node.op == "call_function":
                self._step(node, values)
        return self._results(values)

    def _step(self, node: fx.Node, values: list[dict[fx.Node, Any]]) -> None:
        """One call on every rank."""
        args = [map_arg(node.args, known.__getitem__) for known in values]
        made = _collective(node.target, args)
        for rank, known in enumerate(values):
            known[node] = call_node(node, known) if made is None else made[rank]

    def _inputs(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder" and "input" in n.meta]

    def _results(self, values: list[dict[fx.Node, Any]]) -> list[Tensor]:
        results: Any = self.graph.output_node().args[0]
        every = results if isinstance(results, tuple) else (results,)
        found = [[known[node] for node in every] for known in values]
        for rank, other in enumerate(found[1:], 1):
            if not all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True)):
                raise GraphError(f"ranks 0 and {rank} of a stage have different results")
        return found[0]


@dataclass(frozen=True, slots=True)
class Replica:
    """All stages in order; what one gives out under a name, the next ones take in under it."""

    stages: tuple[Stage, ...]

    def run(self, inputs: Sequence[Sequence[Inputs]]) -> Tensor:
        """The result of the last stage; `inputs` are those of each rank of each stage."""
        crossing: Inputs = {}
        results: list[Tensor] = []
        for stage, given in zip(self.stages, inputs, strict=True):
            results = stage.run([one | crossing for one in given])
            names = stage.graph.output_node().meta.get("outputs", ())
            crossing = dict(zip(names, results, strict=False))  # the last gives logits, nameless
        return results[0]
