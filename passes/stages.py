"""Stages: the graph of a model becomes the graph of one pipeline stage, cut at layer bounds.

What another stage computes comes in as a step input ("hidden_0", …) and what others need goes out
beside it. What follows from positions alone (rope tables) is computed again in each stage. Runs
before PageAttention, so that each stage has pools for its own layers alone.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import fx

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.parallel import check_stages
from sitsc.core.printer import symbol_names
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import add_input, layer_of, module_path, tensor
from sitsc.passes.layers import num_layers

CROSSING = "hidden_"


@dataclass(frozen=True, slots=True)
class CutStage:
    """See the module; `bounds` are the first layer of each stage, then the number of layers.

    Raises PartitionError for bounds that do not cover the layers.
    """

    name: ClassVar[str] = "cut_stage"
    preserves_numerics: ClassVar[bool] = True  # of all stages together
    bounds: tuple[int, ...]
    stage: int

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place; one that is cut already, or has one stage alone, stays."""
        output = graph.output_node()
        if "outputs" in output.meta or len(self.bounds) == 2:
            return
        check_stages(self.bounds, num_layers(graph))
        stages = _stages(graph, self.bounds)
        names = _crossing(graph, stages)
        entering = {n: c.name for n, c in names.items() if stages[n] < self.stage <= c.until}
        leaving = {n: c.name for n, c in names.items() if stages[n] <= self.stage < c.until}
        inputs = _enter(graph, entering)
        if self.stage < len(self.bounds) - 2:
            made: Any = tuple(inputs.get(node, node) for node in leaving)
            output.args = (made if len(made) > 1 else made[0],)
        output.meta["outputs"] = tuple(leaving.values())
        _remove_unused(graph)


@dataclass(frozen=True, slots=True)
class _Crossing:
    """A value's name between stages, and the last stage that needs it."""

    name: str
    until: int


def _stages(graph: fx.Graph, bounds: tuple[int, ...]) -> dict[fx.Node, int]:
    """The stage that computes each call: that of its layer, or the last one that it reads from.

    Calls that any stage may have are left out.
    """
    by_layer = {
        layer: stage
        for stage, (low, high) in enumerate(pairwise(bounds))
        for layer in range(low, high)
    }
    found: dict[fx.Node, int] = {}
    free = _free(graph)
    for node in graph.nodes:
        if node.op != "call_function" or node in free:
            continue
        earlier = max((found[a] for a in node.all_input_nodes if a in found), default=0)
        layer = layer_of(node)
        own = earlier if layer is None else by_layer[layer]
        if own < earlier:
            raise UnsupportedModelError(
                f"layer {layer} reads what a later layer computes",
                where=module_path(node),
                hint="such a model cannot be cut into stages; use TP",
            )
        found[node] = own
    return found


def _free(graph: fx.Graph) -> set[fx.Node]:
    """Calls that follow from positions and weights alone, so that any stage may have them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and all(
            a in found or (a.op == "placeholder" and a.meta.get("input") != "token_ids")
            for a in node.all_input_nodes
        ):
            found.add(node)
    return found


def _crossing(graph: fx.Graph, stages: dict[fx.Node, int]) -> dict[fx.Node, _Crossing]:
    """What is needed past its own stage, in order."""
    found: dict[fx.Node, _Crossing] = {}
    for node, stage in stages.items():
        until = max((stages[u] for u in node.users if u in stages), default=stage)
        if until > stage:
            if not isinstance(node.meta["val"], torch.Tensor):
                raise UnsupportedModelError(
                    "what crosses a stage bound is no tensor", where=module_path(node)
                )
            found[node] = _Crossing(f"{CROSSING}{len(found)}", until)
    return found


def _enter(graph: fx.Graph, entering: dict[fx.Node, str]) -> dict[fx.Node, fx.Node]:
    """Inputs in place of what earlier stages have computed."""
    symbols, made = symbol_names(graph), {}
    for node, name in entering.items():
        dims = tuple(
            size if isinstance(size, int) else symbols[str(size)] for size in tensor(node).shape
        )
        made[node] = add_input(graph, name, tensor(node), dims)
        node.replace_all_uses_with(made[node])
    return made


def _remove_unused(graph: fx.Graph) -> None:
    """Remove what the stage does not compute, and what nothing reads then."""
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users:
            graph.erase_node(node)
