"""Lower linear: every aten.linear with a weight placeholder becomes a bare sitsc::fused_linear.

A cast of its only user to float32 (logits) is taken into the linear layer.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from sitsc.core.weights import dtype_name
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    arguments,
    call,
    calls,
    is_op,
    ops,
    replace,
    set_arguments,
    tensor,
    weight_of,
)

KERNEL_DTYPES = ("float32", "bfloat16")
NOTHING: dict[str, Any] = {
    "scale": None,
    "bias": None,
    "norm_weight": None,
    "residual": None,
    "prologue": "none",
    "eps": 0.0,
    "offset": 0.0,
    "epilogue": "none",
    "activation": "none",
    "weight_format": "plain",
}


def linear_arguments(**given: Any) -> tuple[Any, ...]:
    """Positional arguments of sitsc::fused_linear, with nothing fused unless given."""
    names = [a.name for a in ops.fused_linear.default._schema.arguments]
    values = NOTHING | given
    return tuple(values[name] for name in names)


@dataclass(frozen=True, slots=True)
class LowerLinear:
    """See the module."""

    name: ClassVar[str] = "lower_linear"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "linear"):
            if _is_weight(node.args[1]) and _has_bias_of_its_own(node):
                self._lower(graph, node)
        for node in calls(graph, "_to_copy", "to"):
            if is_op(node.args[0], "fused_linear"):
                _absorb_cast(node)

    def _lower(self, graph: fx.Graph, node: Node) -> None:
        old = arguments(node)
        given = {
            "x": old["input"],
            "weight": old["weight"],
            "bias": old["bias"],
            "out_features": int(tensor(old["weight"]).shape[0]),
            "out_dtype": dtype_name(tensor(node).dtype),
        }
        with graph.inserting_before(node):
            args = linear_arguments(**given)
            replace(node, call(graph, ops.fused_linear.default, args, node))


def _is_weight(node: Node) -> bool:
    spec = weight_of(node)
    if spec is None or spec.dtype not in KERNEL_DTYPES:
        return False
    return spec.role == "weight" and len(spec.shape) == 2


def _has_bias_of_its_own(node: Node) -> bool:
    """Whether the bias is none or stored; one that is computed or a constant stays with aten."""
    bias = arguments(node)["bias"]
    spec = weight_of(bias)
    return bias is None or (spec is not None and spec.role == "weight")


def _absorb_cast(cast: Node) -> None:
    """linear -> float32 as one operator, when nothing else reads the narrower result."""
    linear = cast.args[0]
    if tensor(cast).dtype != torch.float32 or len(linear.users) != 1:
        return
    set_arguments(linear, out_dtype="float32")
    linear.meta["val"] = cast.meta["val"]
    replace(cast, linear)
