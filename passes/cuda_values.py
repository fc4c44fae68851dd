"""Which values of a graph get a buffer on CUDA, and until when each is read.

Elementwise values that one kernel reads are computed inside of it ("inlined"); views are places of
their source. Everything else is stored where it is computed.
"""

from typing import Any

from torch import fx

from sitsc.passes.cuda_refs import is_view
from sitsc.passes.fxutil import arguments, is_op, layer_of

Node = Any
# aten and sitsc operators of elementwise kernels, by the name that code generators know them by.
ELEMENTWISE = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "pow": "pow",
    "neg": "neg",
    "abs": "abs",
    "exp": "exp",
    "log": "log",
    "sqrt": "sqrt",
    "rsqrt": "rsqrt",
    "reciprocal": "reciprocal",
    "square": "square",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "cos": "cos",
    "sin": "sin",
    "maximum": "maximum",
    "minimum": "minimum",
    "clamp": "clamp",
    "glu": "glu",
    "eq": "eq",
    "ne": "ne",
    "masked_fill": "masked_fill",
}
CASTS = ("_to_copy", "to", "clone", "contiguous", "keep")
MOVES = ("cat", "stack", "repeat_interleave", "rope")
REDUCTIONS = ("mean", "sum")


def is_lazy(node: Node) -> bool:
    """Whether a call can be computed element by element inside of another kernel."""
    return is_op(node, *ELEMENTWISE, *CASTS, *MOVES) or is_lookup(node)


def is_lookup(node: Node) -> bool:
    """Whether a call takes rows of a constant table; rows that need logits are taken otherwise."""
    return is_op(node, "index") and not is_selection(node)


def is_selection(node: Node) -> bool:
    """Whether a call takes the rows that need logits."""
    if not is_op(node, "index"):
        return False
    given = [item for item in node.args[1] if item is not None]
    return len(given) == 1 and given[0].meta.get("input") == "logit_rows"


def layers_by_node(graph: fx.Graph) -> dict[Node, int | None]:
    """The decoder layer of every call; one without a module belongs to the layer around it."""
    found: dict[Node, int | None] = {}
    last, between = None, []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found[node] = layer = layer_of(node)
        if layer is None:
            between.append(node)
        else:
            found |= dict.fromkeys(between if layer == last else [], layer)
            last, between = layer, []
    return found


class Values:
    """Facts about the readers of values; `decode` steps need logits of every row."""

    def __init__(self, graph: fx.Graph, decode: bool) -> None:
        self.layer = layers_by_node(graph)
        self.order = {node: index for index, node in enumerate(graph.nodes)}
        self.decode = decode
        self._stored: dict[Node, bool] = {}
        self._last: dict[Node, int] = {}

    def passes_through(self, node: Node) -> bool:
        """Whether a call only names memory of its source."""
        return is_view(node) or (self.decode and is_selection(node))

    def readers(self, node: Node) -> list[Node]:
        """The calls that read a value, directly or through views, each once."""
        found: dict[Node, None] = {}
        for user in node.users:
            found |= dict.fromkeys(self.readers(user) if self.passes_through(user) else [user])
        return list(found)

    def stored(self, node: Node) -> bool:
        """Whether an elementwise value, or a copy that a view needs, gets a buffer of its own."""
        if node not in self._stored:
            readers = self.readers(node)
            many = len(readers) > 1 and not is_op(node, *CASTS, "neg")
            apart = any(self.layer.get(r) != self.layer.get(node) for r in readers)
            self._stored[node] = many or apart or not all(_inlines(r, node) for r in readers)
        return self._stored[node]

    def last_read(self, node: Node) -> int:
        """The place in the graph of the last kernel that reads a value's memory."""
        if node not in self._last:
            self._last[node] = self.order[node]
            ends = [self._end(user) for user in node.users]
            self._last[node] = max([self.order[node], *ends])
        return self._last[node]

    def _end(self, user: Node) -> int:
        inside = self.passes_through(user) or (is_lazy(user) and not self.stored(user))
        return max(self.order[user], self.last_read(user)) if inside else self.order[user]


def _inlines(reader: Node, value: Node) -> bool:
    """Whether a reader computes `value` itself when that has no buffer."""
    if is_op(reader, "paged_attention"):
        a = arguments(reader)
        tables = [a[name] for name in ("cos", "sin", "sinks")]
        return not any(_reaches(table, value) for table in tables)
    return is_lazy(reader) or is_op(reader, *REDUCTIONS)


def _reaches(node: Node, value: Node) -> bool:
    """Whether `node` is `value` or a view of it."""
    while node is not value:
        if not (isinstance(node, fx.Node) and is_view(node)):
            return False
        node = node.args[0]
    return True
