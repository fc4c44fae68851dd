"""How tensor parallelism would cut each operator of a final graph, found by following its values.

In: a graph after its passes. Out: a role for every call that computes. A value is "cut" when each
rank holds a part of it. Changes nothing; the sharding passes do the cutting.
"""

from typing import Any

from torch import fx

from sitsc.passes.cuda_values import layers_by_node
from sitsc.passes.fxutil import arguments, is_op, tensor
from sitsc.passes.model_record import BY_EXPERTS, COLUMN, HEADS, ROW, VOCABULARY, WHOLE

Node = Any
_ANCHORS = ("fused_linear", "addmm", "moe", "paged_attention", "packed_embedding", "embedding")


def roles(graph: fx.Graph) -> dict[Node, str]:
    """The role of every call in `graph`."""
    return _Roles(graph).run(graph)


class _Roles:
    def __init__(self, graph: fx.Graph) -> None:
        self.layer = layers_by_node(graph)
        self.cut: dict[Node, bool] = {}
        self.found: dict[Node, str] = {}
        self.reached: dict[Node, frozenset[tuple[Node, str]]] = {}

    def run(self, graph: fx.Graph) -> dict[Node, str]:
        for node in graph.nodes:
            if node.op == "call_function":
                self.found[node] = role = self._role(node)
                self.cut[node] = role in (COLUMN, HEADS)
        return self.found

    def _role(self, node: Node) -> str:
        if is_op(node, "packed_embedding", "embedding"):
            return VOCABULARY if _of_tokens(node) else WHOLE
        if is_op(node, "paged_attention"):
            return HEADS
        if is_op(node, "moe"):
            return BY_EXPERTS
        if is_op(node, "fused_linear", "addmm"):
            return self._linear(node)
        return HEADS if any(self.cut.get(n) for n in node.all_input_nodes) else WHOLE

    def _linear(self, node: Node) -> str:
        x = arguments(node)["x"] if is_op(node, "fused_linear") else node.args[1]
        if self.cut.get(x):
            return ROW
        ends = self._reach(node)
        if any(how == "output" for _, how in ends):
            return VOCABULARY
        linears = [n for n, how in ends if how == "linear"]
        if any(how == "attention" for n, how in ends):
            # A latent that is expanded again before attention stays whole.
            return WHOLE if any(self._feeds_attention(n) for n in linears) else COLUMN
        if len(linears) == len(ends) == 1 and not self._feeds_attention(linears[0]):
            other = linears[0]
            wide = arguments(other)["x"] if is_op(other, "fused_linear") else other.args[1]
            inner, width = int(tensor(wide).shape[-1]), int(tensor(node).shape[-1])
            # Twice as wide where gate and up are one and their product stands apart.
            if width in (inner, 2 * inner) and self.layer[other] == self.layer[node] is not None:
                return COLUMN
        return WHOLE

    def _feeds_attention(self, node: Node) -> bool:
        return any(how == "attention" for _, how in self._reach(node))

    def _reach(self, node: Node) -> frozenset[tuple[Node, str]]:
        """(call, how): the next linears, attentions, experts and outputs that read a value."""
        if node not in self.reached:
            self.reached[node] = frozenset()
            ends: set[tuple[Node, str]] = set()
            for user in node.users:
                ends |= self._at(user, node)
            self.reached[node] = frozenset(ends)
        return self.reached[node]

    def _at(self, user: Node, value: Node) -> frozenset[tuple[Node, str]]:
        if user.op == "output":
            return frozenset({(user, "output")})
        if is_op(user, "fused_linear") and arguments(user)["residual"] is value:
            return frozenset({(user, "residual")})
        if is_op(user, "fused_linear", "addmm"):
            return frozenset({(user, "linear")})
        if is_op(user, "paged_attention"):
            return frozenset({(user, "attention")})
        if is_op(user, *_ANCHORS):
            return frozenset({(user, "other")})
        return self._reach(user)


def _of_tokens(node: Node) -> bool:
    """Whether an embedding is of token ids, and not of positions or types."""
    ends = list(node.all_input_nodes)
    while ends:
        one = ends.pop()
        if one.meta.get("input") == "token_ids":
            return True
        if one.op == "call_function":
            ends += list(one.all_input_nodes)
    return False
