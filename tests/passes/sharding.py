"""Running a partitioned model in one process: all stages and ranks together, step by step."""

import copy
from collections import Counter

import torch
from torch import Tensor, fx, nn

from sitsc.core.interpret import RandomTensors, step_inputs, tensor_shapes
from sitsc.core.lockstep import Replica, Stage
from sitsc.core.parallel import Partition, even_stages
from sitsc.core.verify import verify_graph
from sitsc.passes import CPU
from sitsc.passes.base import Pass, PassContext
from sitsc.passes.for_rank import stage_passes
from sitsc.passes.runner import tidy
from sitsc.passes.shard_table import weights_of_rank

CONTEXT = PassContext("float32", "none", "float32", 16, "cpu")
IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(22)]
PREFILL, STEPS = 18, 2  # past a window of 16, then steps of two tokens
# What a rank has besides collectives: the lookup of the rows of a table that it holds.
LOOKUP = Counter({"mul": 1, "sub": 1, "clamp": 1, "ne": 1, "unsqueeze": 1, "masked_fill": 1})
COLLECTIVES = ("all_reduce", "all_gather")


def apply(
    graph: fx.Graph, passes: tuple[Pass, ...], context: PassContext, *, verify: bool = False
) -> fx.Graph:
    """The graph after `passes`, which may be verified at the end."""
    for item in passes:
        item.run(graph, context)
        tidy(graph)
    if verify:
        verify_graph(graph, passes[-1].name)
    return graph


class Model:
    """A traced model up to where it is cut, and its result over several steps as one rank."""

    def __init__(
        self,
        module: fx.GraphModule,
        passes: tuple[Pass, ...] = CPU,
        ids: list[int] = IDS,
        context: PassContext = CONTEXT,
    ) -> None:
        self.ids, self.context = ids, context
        at = [item.name for item in passes].index("page_attention")
        self.rest = passes[at:]
        self.graph = apply(module.graph, passes[:at], context)
        self.weights = RandomTensors(tensor_shapes(self.graph))
        self.layers = 1 + max(
            n.args[4] for n in self.graph.nodes if "sitsc.attention" in str(n.target)
        )
        self.whole = apply(self.copy(), self.rest, context)
        self.wanted = self.run(Replica((self._stage(self.whole, 1),)))

    def copy(self) -> fx.Graph:
        return fx.GraphModule(nn.Module(), copy.deepcopy(self.graph)).graph

    def stages(
        self, partition: Partition, bounds: tuple[int, ...] | None = None, most: int = 99
    ) -> list[fx.Graph]:
        """The graph of each stage; `most`: only so many passes after the sharding."""
        found = []
        for stage in range(partition.pp):
            cut = bounds or even_stages(self.layers, partition.pp)
            passes = stage_passes(self.rest, partition, stage, cut)
            end = [item.name for item in passes].index("lower_linear") + most
            both = partition.tp > 1 and partition.pp > 1
            found.append(apply(self.copy(), passes[:end], self.context, verify=both))
        return found

    def _stage(self, graph: fx.Graph, tp: int) -> Stage:
        ranks = [{spec.name: spec for spec in weights_of_rank(graph, r)} for r in range(tp)]
        return Stage(graph, ranks, self.weights.read)

    def result(self, stages: list[fx.Graph], tp: int) -> Tensor:
        """Logits of every token: prefill, then steps of a few tokens, all through the pools."""
        return self.run(Replica(tuple(self._stage(graph, tp) for graph in stages)))

    def run(self, replica: Replica) -> Tensor:
        inputs = [
            [step_inputs(stage.graph, self.ids, CONTEXT.page_tokens) for _ in stage.ranks]
            for stage in replica.stages
        ]
        ends = [PREFILL, *range(PREFILL + STEPS, len(self.ids) + 1, STEPS)]
        parts = []
        for low, high in zip([0, *ends], ends, strict=False):
            step = {
                "token_ids": torch.tensor(self.ids[low:high]),
                "position_ids": torch.arange(low, high),
                "logit_rows": torch.arange(high - low),
                "query_start": torch.tensor([0, high - low], dtype=torch.int32),
                "context_lens": torch.tensor([low], dtype=torch.int32),
            }
            parts.append(replica.run([[one | step for one in some] for some in inputs]))
        return torch.cat(parts)


def op_counts(*graphs: fx.Graph) -> Counter[str]:
    """Calls by the names of operators, views of sizes aside."""
    found: Counter[str] = Counter()
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "call_function":
                schema = getattr(node.target, "_schema", None)
                name = schema.name.split("::")[1] if schema else node.target.__name__
                found[name.replace("split_with_sizes", "split")] += 1
    return found
