"""Layer classes: decoder layers whose operators and shapes are the same share one class.

In: the final graph. Out: the classes in order of first appearance. Weights, the layer's index and
its place in the KV pool do not count; every other argument does.
"""

import hashlib
from typing import Any

from torch import fx

from sitsc.core.plan import LayerClass
from sitsc.core.printer import symbol_names
from sitsc.passes.fxutil import arguments, is_op, layer_of


def num_layers(graph: fx.Graph) -> int:
    """Decoder layers that a graph computes."""
    return len({layer_of(node) for node in graph.nodes if node.op == "call_function"} - {None})


def layer_classes(graph: fx.Graph) -> tuple[LayerClass, ...]:
    """The classes of the decoder layers of `graph`."""
    by_layer: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        layer = layer_of(node) if node.op == "call_function" else None
        if layer is not None:
            by_layer.setdefault(layer, []).append(node)
    symbols = symbol_names(graph)
    found: dict[str, list[int]] = {}
    for layer, nodes in sorted(by_layer.items()):
        found.setdefault(_digest(nodes, symbols), []).append(layer)
    return tuple(
        LayerClass(f"layer_{chr(ord('a') + i)}", tuple(layers), name[:16])
        for i, (name, layers) in enumerate(found.items())
    )


def _digest(nodes: list[fx.Node], symbols: dict[str, str]) -> str:
    places = {node: index for index, node in enumerate(nodes)}
    outside: dict[fx.Node, int] = {}

    def encode(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value in places:
                return ("inside", places[value])
            if (spec := value.meta.get("weight")) is not None:
                return ("weight", spec.stored_shape, spec.dtype, spec.format)
            return ("outside", outside.setdefault(value, len(outside)))
        if isinstance(value, (list, tuple)):
            return tuple(encode(item) for item in value)
        return symbols.get(str(value), repr(value))

    rows = []
    for node in nodes:
        args: dict[Any, Any] = (
            arguments(node) if hasattr(node.target, "_schema") else dict(enumerate(node.args))
        )
        if is_op(node, "paged_attention", "attention"):
            args.pop("layer", None)
        rows.append((str(node.target), tuple((k, encode(v)) for k, v in args.items())))
    return hashlib.sha256(repr(rows).encode()).hexdigest()
