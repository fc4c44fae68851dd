"""What a pass is: a frozen dataclass with a name that rewrites a graph in place.

`preserves_numerics` False marks passes that change results (quantisation): only on demand.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import fx


@dataclass(frozen=True, slots=True)
class PassContext:
    """What every pass may know: the options that decide what it does.

    Of the target only whether it is "cpu": GPUs of all kinds get the same graph.
    """

    dtype: str
    weights: str
    kv_dtype: str
    page_tokens: int
    target: str


class Pass(Protocol):
    """One rewrite of the graph; valid before and after, idempotent."""

    name: ClassVar[str]
    preserves_numerics: ClassVar[bool]

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        ...
