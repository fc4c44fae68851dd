"""Fuse gate·up: two linear layers and the activation between them become one.

The weight rows are [gate; up]; needs an intermediate size that is a multiple of the row block of
the kernels, no bias, and one reader of each half. Otherwise the layers stay apart.
"""

from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import Any, ClassVar

from torch import fx

from sitsc.core.weight_formats import BLOCK_ROWS
from sitsc.core.weights import WeightSpec
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    add_weight,
    arguments,
    call,
    calls,
    is_op,
    ops,
    replace,
    spec_of,
    weight_of,
)
from sitsc.passes.lower_linear import linear_arguments


def joined(specs: list[WeightSpec]) -> WeightSpec:
    """One weight of the rows of several, in order; named after all of them."""
    *path, first, kind = ["", "", *specs[0].name.split(".")]
    names = [first, *(spec.name.split(".")[-2] for spec in specs[1:])]
    rows = sum(spec.shape[0] for spec in specs)
    return with_fields(
        specs[0],
        name=".".join([*path, "+".join(names), kind]).lstrip("."),
        sources=tuple(source for spec in specs for source in spec.sources),
        shape=(rows, *specs[0].shape[1:]),
    )


def plain_linear(node: Node) -> dict[str, Any] | None:
    """Arguments of a fused_linear that has nothing fused yet and only weights to read, or None."""
    if not is_op(node, "fused_linear"):
        return None
    args = arguments(node)
    bare = args["prologue"] == "none" and args["epilogue"] == "none" and args["scale"] is None
    known = args["bias"] is None or weight_of(args["bias"]) is not None
    return args if bare and known and args["weight_format"] == "plain" else None


@dataclass(frozen=True, slots=True)
class FuseGlu:
    """See the module."""

    name: ClassVar[str] = "fuse_glu"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "glu"):
            old = arguments(node)
            gate, up = plain_linear(old["gate"]), plain_linear(old["up"])
            single = all(len(old[key].users) == 1 for key in ("gate", "up"))
            if gate is not None and up is not None and single and _fits(gate, up):
                self._fuse(graph, node, gate, up)

    def _fuse(self, graph: fx.Graph, node: Node, gate: dict[str, Any], up: dict[str, Any]) -> None:
        specs = [spec_of(gate["weight"]), spec_of(up["weight"])]
        given = {key: gate[key] for key in ("x", "out_features", "out_dtype")}
        given |= {"epilogue": "glu", "activation": arguments(node)["activation"]}
        given["weight"] = add_weight(graph, joined(specs), gate["weight"])
        with graph.inserting_before(node):
            args = linear_arguments(**given)
            replace(node, call(graph, ops.fused_linear.default, args, node))


def _fits(gate: dict[str, Any], up: dict[str, Any]) -> bool:
    same = all(gate[key] == up[key] for key in ("x", "out_features", "out_dtype"))
    biased = gate["bias"] is not None or up["bias"] is not None
    different = gate["weight"] is not up["weight"]
    return same and different and not biased and gate["out_features"] % BLOCK_ROWS == 0
