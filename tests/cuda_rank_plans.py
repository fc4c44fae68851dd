"""CUDA plans of several ranks: tiny models cut into stages and shards, planned stage by stage."""

import copy
import inspect
from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn

from sitsc.codegen.cuda import CudaProvider
from sitsc.codegen.cuda_templates import TEMPLATES
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.hardware import CudaLimits
from sitsc.core.kernels import KernelInfo
from sitsc.core.parallel import Partition, even_stages
from sitsc.core.plan import Plan, Rank, Stage
from sitsc.core.weights import ReadRows, materialise
from sitsc.passes.base import Pass
from sitsc.passes.for_rank import stage_passes
from sitsc.passes.layers import num_layers
from sitsc.passes.page_attention import PageAttention
from sitsc.passes.runner import tidy
from sitsc.passes.shard_table import weights_of_rank
from sitsc.passes.stages import CROSSING
from tests.cuda_families import VOCABULARY
from tests.cuda_plan_steps import PASS_CONTEXT, plan_of, provider_of

Shapes = dict[str, dict[str, Any]]


class NotingProvider(CudaProvider):
    """A provider that remembers the shapes of what it made, by the key of the kernel."""

    def __init__(self, target: str, limits: CudaLimits) -> None:
        super().__init__(target, limits)
        self.shapes: Shapes = {}

    def make(self, template: str, **shape: Any) -> KernelInfo:
        """Like the provider's."""
        info = super().make(template, **shape)
        known = inspect.signature(TEMPLATES[template].build).parameters.values()
        defaults = {p.name: p.default for p in known if p.default is not p.empty}
        self.shapes[info.key] = defaults | shape
        return info


def stage_graphs_of(
    graph: fx.Graph, passes: tuple[Pass, ...], partition: Partition
) -> list[fx.Graph]:
    """The final graph of each stage; `graph` is as traced."""
    at = next(i for i, item in enumerate(passes) if isinstance(item, PageAttention))
    apply(graph, passes[:at])
    bounds = even_stages(num_layers(graph), partition.pp)
    found = []
    for stage in range(partition.pp):
        part = fx.GraphModule(nn.Module(), copy.deepcopy(graph)).graph
        apply(part, stage_passes(passes[at:], partition, stage, bounds))
        found.append(part)
    return found


def apply(graph: fx.Graph, passes: tuple[Pass, ...]) -> None:
    """Run passes; nothing is verified in between."""
    for each in passes:
        each.run(graph, PASS_CONTEXT)
        tidy(graph)


def plan_ranks(
    graph: fx.Graph, passes: tuple[Pass, ...], partition: Partition, vocabulary: int = VOCABULARY
) -> tuple[Plan, dict[str, KernelSource], Shapes]:
    """The plan of all ranks as far as it is executed, its kernels, and what was asked for by key.

    `graph` is as traced.
    """
    graphs = stage_graphs_of(graph, passes, partition)
    provider, data = provider_of(NotingProvider)
    assert isinstance(provider, NotingProvider)
    plans = [plan_of(graph, provider, data, partition, vocabulary) for graph in graphs]
    bounds = even_stages(len(plans), partition.pp)
    stages = [
        Stage(
            layers=bounds[index : index + 2],
            receives=tuple(name for name in _inputs(graph) if name.startswith(CROSSING)),
            sends=tuple(graph.output_node().meta.get("outputs", ())),
            parameters=tuple(weights_of_rank(graph, rank) for rank in range(partition.tp)),
            regimes=plan.regimes,
            packages=(),
            kv=plan.kv,
            memory=plan.memory,
        )
        for index, (plan, graph) in enumerate(zip(plans, graphs, strict=True))
    ]
    first = plans[0]
    plan = replace(
        first,
        parallel=replace(first.parallel, tp=partition.tp, pp=partition.pp, ep=partition.ep),
        ranks=tuple(Rank(r, *divmod(r, partition.tp)) for r in range(partition.num_ranks)),
        memory=max((plan.memory for plan in plans), key=lambda memory: memory.arena_bytes),
        stages=tuple(stages),
    )
    return plan, provider.sources, provider.shapes


def weights_of_ranks(plan: Plan, read: ReadRows) -> list[dict[str, Tensor]]:
    """The weights of each rank, by name."""
    return [
        {spec.name: materialise(spec, read) for spec in plan.of_rank(rank).model.parameters}
        for rank in range(plan.num_ranks)
    ]


def _inputs(graph: fx.Graph) -> list[str]:
    return [str(node.meta.get("input", "")) for node in graph.find_nodes(op="placeholder")]
