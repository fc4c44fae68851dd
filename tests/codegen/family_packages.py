"""Several tiny families compiled into one package: one run of the compiler serves them all.

Their graphs share the inputs of a step and nothing else; weights and KV pools are called by family.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from packages import Package
from torch import Tensor, fx, nn

from sitsc.core.interpret import RandomTensors


class Weights:
    """Weights of several families: `read` takes "family/tensor"."""

    def __init__(self, families: Mapping[str, RandomTensors]) -> None:
        self.families = families

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows of a tensor of a family."""
        family, _, tensor = name.partition("/")
        return self.families[family].read(tensor, start, stop)


def combined(graphs: Mapping[str, fx.Graph]) -> fx.Graph:
    """One graph with the results of all, in order."""
    whole, shared, results = fx.Graph(), {}, []
    copies: dict[fx.Node, fx.Node] = {}
    for family, graph in graphs.items():
        for node in graph.find_nodes(op="placeholder"):
            copies[node] = _placeholder(whole, family, node, shared)
    for graph in graphs.values():
        for node in graph.nodes:
            if node.op == "output":
                results.append(copies[node.args[0]])
            elif node.op != "placeholder":
                copies[node] = whole.node_copy(node, lambda n: copies[n])
    whole.output(tuple(results))
    return fx.GraphModule(nn.Module(), whole).graph


def _placeholder(
    whole: fx.Graph, family: str, node: fx.Node, shared: dict[str, fx.Node]
) -> fx.Node:
    name = node.meta.get("input", "")
    if name in shared:
        return shared[name]
    copied = whole.placeholder(f"{family}_{node.name}")
    copied.meta = dict(node.meta)
    if (spec := node.meta.get("weight")) is not None:
        sources = tuple(replace(s, tensor=f"{family}/{s.tensor}") for s in spec.sources)
        copied.meta["weight"] = replace(spec, name=f"{family}.{spec.name}", sources=sources)
    elif name.startswith("kv_"):
        copied.meta["input"] = f"kv_{family}_{name}"
    else:
        shared[name] = copied
    return copied


class FamilyPackage:
    """The package of several families, and its KV pools."""

    def __init__(
        self, graphs: Mapping[str, fx.Graph], weights: Mapping[str, RandomTensors], path: Path
    ) -> None:
        self.families = tuple(graphs)
        self.graph = combined(graphs)
        self.package = Package(self.graph, Weights(weights), path)

    def run(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Logits [rows, vocabulary] of one step by family."""
        given = [values[name] for name in self.package.inputs]
        with torch.no_grad():
            return dict(zip(self.families, self.package.loader.run(given), strict=True))
