"""A plain graph: a function of tensors without pages or scheduler, on its way to an artifact.

What a frontend (modules, ONNX) hands to the pipeline: the graph with its inputs described by
`meta["input"]`, `meta["dims"]` and `meta["example"]` (sizes of the example), names of the outputs,
bounds of the free sizes, and a reader of weights. The graph returns a tensor or a tuple of them.
"""

from dataclasses import dataclass

from torch import fx

from sitsc.core.weights import ReadRows


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """One result: `place` is "tensor" (the only one), "item" (of a tuple) or "key" (of a dict).

    `is_none` marks an item of a tuple that is always None; the graph does not return it.
    """

    name: str
    place: str
    is_none: bool = False


@dataclass(frozen=True, slots=True)
class PlainGraph:
    """See the module; `ranges` are (least, most) of a free size by name, most 0 without a bound.

    `example_sizes` are the sizes of the example inputs by name; `read(name, start, stop)` gives
    rows of the tensors that the weights of the graph are made of.
    """

    name: str
    module: fx.GraphModule
    outputs: tuple[PlainOutput, ...]
    example_sizes: dict[str, int]
    ranges: dict[str, tuple[int, int]]
    read: ReadRows
