"""Fuse gate·up: two linear layers (or halves of one) and the activation between them become one.

The weight rows are [gate; up]; needs an intermediate size that is a multiple of the row block of
the kernels, no bias (but where it is allowed), and one reader of each half. Otherwise the layers
stay apart.
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
from sitsc.passes.slices import half


def joined(specs: list[WeightSpec]) -> WeightSpec:
    """One weight of the rows of several, in order; named after all of them."""
    *path, first, kind = ["", "", *specs[0].name.split(".")]
    names = [first, *(["", *spec.name.split(".")][-2] or spec.name for spec in specs[1:])]
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
    biased: bool = False

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "glu"):
            gate, up = node.args[:2]
            if any(len(part.users) != 1 for part in (gate, up)):
                continue
            given = _two_layers(graph, gate, up, self.biased)
            given = given or _one_layer(gate, up, self.biased)
            if given is not None:
                args = linear_arguments(**given, epilogue="glu", activation=node.args[2])
                with graph.inserting_before(node):
                    replace(node, call(graph, ops.fused_linear.default, args, node))


def _two_layers(graph: fx.Graph, gate: Node, up: Node, may: bool) -> dict[str, Any] | None:
    """Arguments of the fused layer when gate and up are layers of their own."""
    one, two = plain_linear(gate), plain_linear(up)
    if one is None or two is None or one["weight"] is two["weight"]:
        return None
    given = {key: one[key] for key in ("x", "out_features", "out_dtype")}
    biases = [part["bias"] for part in (one, two) if part["bias"] is not None]
    if (biases and not (may and len(biases) == 2)) or any(
        two[key] != value for key, value in given.items()
    ):
        return None
    if given["out_features"] % BLOCK_ROWS:
        return None
    specs = [spec_of(one["weight"]), spec_of(two["weight"])]
    given["weight"] = add_weight(graph, joined(specs), one["weight"])
    if biases:
        given["bias"] = add_weight(graph, joined([spec_of(b) for b in biases]), biases[0])
    return given


def _one_layer(gate: Node, up: Node, may: bool) -> dict[str, Any] | None:
    """Arguments of the fused layer when gate and up are the halves of one layer's output."""
    first, second = half(gate), half(up)
    if first is None or second is None or first[0] is not second[0]:
        return None
    whole = plain_linear(first[0])
    in_order = (first[1:], second[1:]) == ((0, "half"), (1, "half"))
    if whole is None or (whole["bias"] is not None and not may) or not in_order:
        return None
    size, odd = divmod(whole["out_features"], 2 * BLOCK_ROWS)
    if odd or not _read_only_by(first[0], {gate, up}):
        return None
    given = {key: whole[key] for key in ("x", "weight", "bias", "out_dtype")}
    return given | {"out_features": size * BLOCK_ROWS}


def _read_only_by(node: Node, parts: set[Node]) -> bool:
    return all(user in parts or set(user.users) <= parts for user in node.users)
