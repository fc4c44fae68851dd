"""A graph as text: one line a node, symbols and names made stable, for goldens, dumps and errors.

The same graph gives the same text on every machine: symbolic sizes are named after the step input
they come from, values %0, %1 … in order, weights by their checkpoint names.
"""

import re
from typing import Any

import torch
from torch import fx

_SYMBOL = re.compile(r"\b[su]\d+\b")
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32"}


def symbol_names(graph: fx.Graph) -> dict[str, str]:
    """Names of the symbolic sizes in a graph, from the dimension names of its step inputs."""
    names: dict[str, str] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        for size, dim in zip(value.shape, node.meta.get("dims", ()), strict=False):
            if not isinstance(size, int):
                names.setdefault(str(size), str(dim))
    return names


class Printer:
    """Prints nodes of one graph; `line(node)` for one, `text()` for all."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.symbols = symbol_names(graph)
        self.names: dict[fx.Node, str] = {}
        for node in graph.nodes:
            self.names[node] = self._name(node, len(self.names))

    def _name(self, node: fx.Node, index: int) -> str:
        if "weight" in node.meta:
            return f"@{node.meta['weight'].name}"
        return str(node.meta.get("input") or f"%{index - self._num_placeholders()}")

    def _num_placeholders(self) -> int:
        return sum(node.op == "placeholder" for node in self.graph.nodes)

    def size(self, value: Any) -> str:
        """A size or an expression of sizes with readable symbols."""
        return _SYMBOL.sub(lambda m: self.symbols.get(m.group(0), m.group(0)), str(value))

    def type_of(self, node: fx.Node) -> str:
        """ "bf16[tokens, 576]" of a node, or "" when it is no tensor."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            dims = node.meta.get("dims")
            shape = (
                ", ".join(str(d) for d in dims) if dims else ", ".join(map(self.size, value.shape))
            )
            name = str(value.dtype).removeprefix("torch.")
            return f"{_DTYPES.get(name, name)}[{shape}]"
        return (
            ""
            if value is None
            else self.size(value)
            if not isinstance(value, (list, tuple))
            else "tuple"
        )

    def argument(self, value: Any) -> str:
        """One argument of a call."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self.argument(item) for item in value) + "]"
        if isinstance(value, float):
            return f"{value:.6g}"
        return self.size(value) if isinstance(value, torch.SymInt) else str(value)

    def line(self, node: fx.Node) -> str:
        """One node as text."""
        if node.op == "placeholder":
            extra = f" {node.meta['weight'].format}" if "weight" in node.meta else ""
            return f"{self.names[node]}: {self.type_of(node)}{extra}"
        args = [self.argument(a) for a in node.args]
        args += [f"{key}={self.argument(a)}" for key, a in node.kwargs.items()]
        if node.op == "output":
            return f"return {', '.join(args)}"
        kind = f": {self.type_of(node)}" if self.type_of(node) else ""
        return f"{self.names[node]}{kind} = {target_name(node)}({', '.join(args)})"

    def text(self) -> str:
        """The whole graph, one line a node, unused weights left out."""
        lines = [self.line(n) for n in self.graph.nodes if n.op != "placeholder" or n.users]
        return "\n".join(lines) + "\n"


def target_name(node: fx.Node) -> str:
    """ "sitsc.rms_norm" or "aten.add.Tensor" of a call."""
    name = str(node.target)
    if name.startswith("<built-in function getitem"):
        return "getitem"
    return name.removesuffix(".default")


def print_graph(graph: fx.Graph) -> str:
    """The text of a graph."""
    return Printer(graph).text()
