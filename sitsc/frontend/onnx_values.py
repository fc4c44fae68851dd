"""Values of a graph that depend on the number of tokens alone: positions, masks.

Exporters write them in many ways, so they are recognised by what they are: computed for a few
numbers of tokens and compared. A value that depends on token ids or weights is never computed.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate, map_arg

from sitsc.core.errors import UnsupportedModelError

MAX_ELEMENTS = 1 << 26


class TokenValues:
    """Computes nodes for a number of tokens; `constants` are the values of placeholders.

    `positions` is the placeholder that holds 0 … tokens − 1, `inputs` all whose sizes are known.
    """

    def __init__(
        self, graph: fx.Graph, inputs: Iterable[str], constants: Mapping[fx.Node, Tensor]
    ) -> None:
        self.graph, self.constants = graph, constants
        self.inputs = {n for n in graph.nodes if n.op == "placeholder" and n.name in inputs}
        self.known = self._known()

    def _known(self) -> set[fx.Node]:
        """Nodes that can be computed: from sizes, constants and positions."""
        known = set(self.constants)
        known |= {node for node in self.inputs if node.name == "position_ids"}
        for node in self.graph.nodes:
            if node.op != "call_function" or node.target is torch.ops.sitsc.attention.default:
                continue
            size_of_input = _is_size(node) and node.args[0] in self.inputs
            if size_of_input or all(n in known for n in node.all_input_nodes):
                known.add(node)
        return known

    def without_positions(self) -> set[fx.Node]:
        """Known nodes that do not read the positions of tokens, but some number of them."""
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node in self.known and node.op == "call_function":
                sized = _is_size(node) and node.args[0] in self.inputs
                parents = [n for n in node.all_input_nodes if n not in self.constants]
                if sized or all(n in found for n in parents):
                    found.add(node)
        return found

    def compute(self, node: fx.Node, tokens: int) -> Any:
        """The value of a known node. Raises UnsupportedModelError when it would be too large."""
        needed = _ancestors(node)
        values: dict[fx.Node, Any] = {}
        for each in self.graph.nodes:
            if each not in needed:
                continue
            if each in self.constants:
                values[each] = self.constants[each]
            elif each in self.inputs:
                values[each] = torch.arange(tokens)
            elif each.op == "call_function":
                values[each] = self._call(each, values, tokens)
        return values[node]

    def _call(self, node: fx.Node, values: dict[fx.Node, Any], tokens: int) -> Any:
        for size in getattr(node.meta.get("val"), "shape", ()):
            if isinstance(size, int) and size > MAX_ELEMENTS:
                raise UnsupportedModelError(f"a constant of {size} elements is computed")
        if (elements := _elements(node, tokens)) > MAX_ELEMENTS:
            raise UnsupportedModelError(f"a mask of {elements} elements is too large to look at")
        args = map_arg(node.args, lambda n: values[n])
        kwargs = dict(map_arg(node.kwargs, lambda n: values[n]))
        if isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = torch.device("cpu")
        target: Any = node.target
        with torch.no_grad():
            return target(*args, **kwargs)


def _is_size(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.sym_size")


def _elements(node: fx.Node, tokens: int) -> int:
    """Elements of a value, every symbolic size taken for the number of tokens at most squared."""
    shape = getattr(node.meta.get("val"), "shape", ())
    return math.prod(size if isinstance(size, int) else 2 * tokens for size in shape) // (
        4 if sum(not isinstance(size, int) for size in shape) > 1 else 1
    )


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        for parent in waiting.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def numbers(node: fx.Node) -> set[int]:
    """Plain numbers in the calls that a value is computed by: a window is one of them."""
    found: set[int] = set()
    for each in _ancestors(node):

        def note(item: Any) -> Any:
            if isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item):
                found.add(abs(int(item)))
            return item

        map_aggregate((each.args, dict(each.kwargs)), note)
    return found
