"""Merge linears: layers that read one input (q, k, v) become one, its output split by views."""

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from sitsc.passes.base import PassContext
from sitsc.passes.fuse_glu import joined, plain_linear
from sitsc.passes.fxutil import Node, add_weight, aten, call, calls, layer_of, ops, replace, spec_of
from sitsc.passes.lower_linear import linear_arguments


@dataclass(frozen=True, slots=True)
class MergeLinears:
    """See the module."""

    name: ClassVar[str] = "merge_linears"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        groups: dict[Any, list[Node]] = {}
        for node in calls(graph, "fused_linear"):
            if (args := plain_linear(node)) is not None and layer_of(node) is not None:
                biased = args["bias"] is not None
                key = (args["x"], biased, args["out_dtype"], layer_of(node))
                groups.setdefault(key, []).append(node)
        for nodes in groups.values():
            if len(nodes) > 1:
                self._merge(graph, nodes)

    def _merge(self, graph: fx.Graph, nodes: list[Node]) -> None:
        every: list[Any] = [plain_linear(node) for node in nodes]
        weight = _joined(graph, [args["weight"] for args in every])
        bias = None
        if every[0]["bias"] is not None:
            bias = _joined(graph, [args["bias"] for args in every])
        sizes = [args["out_features"] for args in every]
        given = {"x": every[0]["x"], "weight": weight, "bias": bias, "out_features": sum(sizes)}
        with graph.inserting_before(nodes[0]):
            args = linear_arguments(**given, out_dtype=every[0]["out_dtype"])
            whole = call(graph, ops.fused_linear.default, args, nodes[0])
            parts = call(graph, aten.split_with_sizes.default, (whole, sizes, -1), nodes[0])
            for index, node in enumerate(nodes):
                replace(node, call(graph, operator.getitem, (parts, index), node))


def _joined(graph: fx.Graph, weights: list[Node]) -> Node:
    return add_weight(graph, joined([spec_of(weight) for weight in weights]), weights[0])
