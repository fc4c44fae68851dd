"""Lower addmm: bias + x @ weight, with a weight of [columns, rows] (GPT-2), to a linear layer.

The weight is read transposed when it is placed, so that kernels see [rows, columns] as always. The
reshapes around it to two dimensions stay; later passes remove them.
"""

from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import ClassVar

from torch import fx

from sitsc.core.ranges import Cut
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    aten,
    call,
    calls,
    is_op,
    replace,
    set_weight,
    spec_of,
    tensor,
    weight_of,
)

TRANSPOSED = "columns"


@dataclass(frozen=True, slots=True)
class LowerAddmm:
    """See the module; a weight that something else reads too stays as it is."""

    name: ClassVar[str] = "lower_addmm"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        for node in calls(graph, "addmm"):
            bias, x, weight = node.args[:3]
            if node.kwargs or not all(map(_is_plain, (bias, weight))):
                continue
            if len(weight.users) == 1:
                self._lower(graph, node, bias, x, weight)

    def _lower(self, graph: fx.Graph, node: Node, bias: Node, x: Node, weight: Node) -> None:
        spec = spec_of(weight)
        (source,) = spec.sources
        rows = spec.shape[0]  # of the tensor: a spec of its scales has no other way to know them
        part = f"{TRANSPOSED} {Cut(-1, ((0, rows),), rows).word}"
        columns = with_fields(source, stop=spec.shape[1], part=part)
        turned = with_fields(spec, shape=spec.shape[::-1], sources=(columns,))
        set_weight(weight, turned, tensor(weight))
        out, (before, width) = node, (x, tensor(node).shape[-1])
        if is_op(x, "reshape") and tensor(x.args[0]).shape[-1] == tensor(x).shape[-1]:
            before = x.args[0]
        with graph.inserting_before(node):
            wide = call(graph, aten.linear.default, (before, weight, bias), node)
            flat = (
                wide
                if before is x
                else call(graph, aten.reshape.default, (wide, [-1, width]), node)
            )
        replace(out, flat)
        for user in list(flat.users):
            if before is not x and is_op(user, "reshape") and _same_shape(user, wide):
                replace(user, wide)


def _same_shape(one: Node, two: Node) -> bool:
    return [*map(str, tensor(one).shape)] == [*map(str, tensor(two).shape)]


def _is_plain(node: Node) -> bool:
    """Whether a value is one whole weight as the checkpoint has it."""
    spec = weight_of(node)
    if spec is None or (spec.role, spec.format, len(spec.sources)) != ("weight", "plain", 1):
        return False
    return not spec.sources[0].part
