"""Names of weights in launches that are repeated for layers: which part of a name is the layer.

In: the name of a layer's weight. Out: the same with the layer left open, and back. A kernel that
works ahead for the layer after its own reads a weight of that one.
"""

LAYER, NEXT = "{layer}", "{layer+1}"


def open_name(name: str, layer: int, *, following: bool = False) -> str:
    """A name with the first part that is the launch's layer left open, or the one that follows.

    The name of a weight that is no layer's own, or another's, stays as it is.
    """
    parts = name.split(".")
    number, word = (str(layer + 1), NEXT) if following else (str(layer), LAYER)
    if number in parts:
        parts[parts.index(number)] = word
    return ".".join(parts)


def name_in_layer(name: str, layer: int | None) -> str:
    """The name of a weight in a layer of its group; outside of layers it is as it stands."""
    if layer is None:
        return name
    return name.replace(LAYER, str(layer)).replace(NEXT, str(layer + 1))
