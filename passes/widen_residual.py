"""Widen the residual stream: it stays in float32 from the embedding to the last norm.

Sums of layers are then rounded once, in the norm that reads them, and not after every layer. Values
that anything but a norm before a linear layer, a residual sum or the selection of rows reads stay
as they are. Sums of ranks take and give it; what crosses the bounds of stages is always wide. Only
for targets whose kernels take such a stream, and only on demand.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from sitsc.core.weights import DTYPES
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    arguments,
    aten,
    call,
    calls,
    fake,
    is_op,
    set_arguments,
    tensor,
)
from sitsc.passes.stages import CROSSING

_WIDE = "float32"


@dataclass(frozen=True, slots=True)
class WidenResidual:
    """See the module."""

    name: ClassVar[str] = "widen_residual"
    preserves_numerics: ClassVar[bool] = False

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        stream = _stream(graph)
        for node in list(graph.nodes):
            if _enters(node):
                _widen_input(graph, node, node in stream)
            elif node in stream:
                if is_op(node, "fused_linear"):
                    set_arguments(node, out_dtype=_WIDE)
                elif is_op(node, "packed_embedding"):
                    set_arguments(node, dtype=_WIDE)
                fake(node)
        _widen_outputs(graph)


def _enters(node: Node) -> bool:
    """An input that an earlier stage has computed."""
    name = str(node.meta.get("input", ""))
    return name.startswith(CROSSING) and tensor(node).dtype == DTYPES["bfloat16"]


def _widen_input(graph: fx.Graph, node: Node, wide: bool) -> None:
    """The input as float32, and for what cannot read it so, narrowed at once."""
    narrow = tensor(node)
    node.meta["val"] = narrow.float()
    if not wide:
        readers = list(node.users)
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            cast = call(graph, aten._to_copy.default, (node,), node, dtype=narrow.dtype)
        for reader in readers:
            reader.replace_input_with(node, cast)


def _widen_outputs(graph: fx.Graph) -> None:
    """What later stages read, as float32."""
    output = graph.output_node()
    results: Any = output.args[0]
    if not output.meta.get("outputs"):
        return
    for node in results if isinstance(results, tuple) else (results,):
        if tensor(node).dtype == DTYPES["bfloat16"]:
            with graph.inserting_before(output):
                wide = call(graph, aten._to_copy.default, (node,), node, dtype=DTYPES[_WIDE])
            output.replace_input_with(node, wide)


def _stream(graph: fx.Graph) -> set[Node]:
    """The values that can be wide: the largest set of sums that only such sums and norms read."""
    found = set(calls(graph, "packed_embedding", "index"))
    found |= {n for n in calls(graph, "fused_linear") if arguments(n)["epilogue"] == "residual"}
    found |= {n for n in calls(graph, "all_reduce", "masked_fill") if _sums(n)}
    found |= {n for n in graph.nodes if n.op == "placeholder" and _enters(n)}
    found = {node for node in found if tensor(node).dtype == DTYPES["bfloat16"]}
    while wrong := {node for node in found if not _stays(node, found)}:
        found -= wrong
    return found


def _sums(node: Node) -> bool:
    """A sum of ranks that adds to the stream, or begins it with the rows of a table in parts."""
    if is_op(node, "masked_fill"):
        return is_op(node.args[0], "packed_embedding")
    return arguments(node)["residual"] is not None or is_op(node.args[0], "masked_fill")


def _stays(node: Node, stream: set[Node]) -> bool:
    """Whether what a value is made from and all that read it can be wide with it."""
    begins = is_op(node, "all_reduce") and arguments(node)["residual"] is None
    if (begins or is_op(node, "index", "masked_fill")) and node.args[0] not in stream:
        return False
    if is_op(node, "all_reduce") and not begins and arguments(node)["residual"] not in stream:
        return False
    if is_op(node, "fused_linear") and arguments(node)["residual"] not in stream:
        return False
    return all(_reads_wide(user, node, stream) for user in node.users)


def _reads_wide(user: Node, node: Node, stream: set[Node]) -> bool:
    if is_op(user, "index", "masked_fill"):
        return user in stream
    if is_op(user, "all_reduce"):
        a = arguments(user)
        added = a["residual"] is node and a["x"] is not node
        return user in stream and (added or a["residual"] is None)
    if user.op == "output":
        return bool(user.meta.get("outputs"))
    if not is_op(user, "fused_linear"):
        return False
    a = arguments(user)
    normed = a["x"] is node and a["prologue"] == "rms_norm"
    added = a["residual"] is node and user in stream
    places = [name for name, value in a.items() if value is node]
    return all((name == "x" and normed) or (name == "residual" and added) for name in places)
