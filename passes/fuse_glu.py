"""Fuse gate·up: two linear layers and the activation between them become one.

The weight rows are [gate; up]; needs an intermediate size that is a multiple of the row block of the
kernels, no bias, and one reader of each half. Otherwise the layers stay apart.
"""

from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import ClassVar

from torch import fx

from sitsc.core.weight_formats import BLOCK_ROWS
from sitsc.core.weights import WeightSpec
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import add_weight, arguments, call, is_op, ops, replace, weight_of
from sitsc.passes.lower_linear import linear_arguments


def joined(specs: list[WeightSpec]) -> WeightSpec:
    """One weight of the rows of several, in order; named after all of them."""
    prefix, names = specs[0].name.rsplit(".", 2)[0], [s.name.rsplit(".", 2)[-2] for s in specs]
    rows = sum(spec.shape[0] for spec in specs)
    return with_fields(
        specs[0],
        name=f"{prefix}.{'+'.join(names)}.{specs[0].name.rsplit('.', 1)[-1]}",
        sources=tuple(source for spec in specs for source in spec.sources),
        shape=(rows, *specs[0].shape[1:]),
    )


def plain_linear(node: object) -> dict[str, object] | None:
    """Arguments of a fused_linear that has nothing fused yet, or None."""
    if not isinstance(node, fx.Node) or not is_op(node, "fused_linear"):
        return None
    args = arguments(node)
    bare = args["prologue"] == "none" and args["epilogue"] == "none"
    return args if bare and args["scale"] is None and args["weight_format"] == "plain" else None


@dataclass(frozen=True, slots=True)
class FuseGlu:
    """See the module."""

    name: ClassVar[str] = "fuse_glu"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in list(graph.nodes):
            if is_op(node, "glu"):
                self._fuse(graph, node)

    def _fuse(self, graph: fx.Graph, node: fx.Node) -> None:
        old = arguments(node)
        gate, up = plain_linear(old["gate"]), plain_linear(old["up"])
        if gate is None or up is None or gate["x"] is not up["x"]:
            return
        size, biased = gate["out_features"], gate["bias"] is not None or up["bias"] is not None
        if biased or size != up["out_features"] or size % BLOCK_ROWS:  # pyright: ignore
            return
        if len(old["gate"].users) != 1 or len(old["up"].users) != 1:
            return
        specs = [weight_of(gate["weight"]), weight_of(up["weight"])]
        if specs[0] is None or specs[1] is None or specs[0].sources == specs[1].sources:
            return
        weight = add_weight(graph, joined([specs[0], specs[1]]), gate["weight"])  # pyright: ignore
        given = {"x": gate["x"], "weight": weight, "out_features": size, "epilogue": "glu"}
        given |= {"activation": old["activation"], "out_dtype": gate["out_dtype"]}
        with graph.inserting_before(node):
            args = linear_arguments(**given)
            replace(node, call(graph, ops.fused_linear.default, args, node))
