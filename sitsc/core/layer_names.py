"""Names of weights in launches that are repeated for layers: which part of a name is the layer.

In: the name of a layer's weight. Out: the same with the layer left open, and back. A kernel that
works ahead for the layer after its own reads a weight of that one.
"""

LAYER, NEXT = "{layer}", "{layer+1}"


def open_name(name: str, *, following: bool = False) -> str:
    """A weight's name with its layer left open, as one of the launch's layer or of the next."""
    word = NEXT if following else LAYER
    return ".".join(word if part.isdigit() else part for part in name.split("."))


def name_in_layer(name: str, layer: int | None) -> str:
    """The name of a weight in a layer of its group; outside of layers it is as it stands."""
    if layer is None:
        return name
    return name.replace(LAYER, str(layer)).replace(NEXT, str(layer + 1))
