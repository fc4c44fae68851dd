"""What the planner asks of a code generator: kernel instances, without importing it.

In: a template's name, the shape it is for and a tile. Out: the key of the instance, its arguments
in order, its grid and the scratch it needs. `codegen` provides it; `passes` schedule with it.
"""

from dataclasses import dataclass
from typing import Any, Protocol

# Programs of kernels between ranks: buffers that they meet at are planned for so many.
MOST_PROGRAMS = 256  # of a collective: that a call is counted for
CROSSING_PROGRAMS = 64  # of every send and receive: they wait for each other one by one


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """One kernel instance: `grid` entries are numbers or names of step sizes ("sequences")."""

    key: str
    template: str
    arguments: tuple[tuple[str, str], ...]
    grid: tuple[int | str, ...]
    tile: dict[str, int]
    dependent: bool
    num_partials: int = 0
    num_counters: int = 0


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An elementwise kernel as data, one row of the step a program.

    `sizes` are those of the row's dimensions, with indices i0, i1 …; `inputs` the dtypes of the
    pointers. A line is (result, operation, operands …, dtype): "load" has the number of an input,
    an index and a mask (texts of t, the row, and of indices); "select" a condition and two values;
    others name a function of the code generator. `reduce` takes the "mean" or "sum" over the last
    dimension; the result goes to `out_index` as `out_dtype`.
    """

    sizes: tuple[int, ...]
    inputs: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    result: str
    out_dtype: str
    out_index: str
    reduce: str = ""


class KernelProvider(Protocol):
    """Makes kernel instances for one target."""

    def linear(
        self,
        shape: dict[str, Any],
        tokens: int,
        *,
        parts: bool = False,
        norm_apart: bool = False,
        squares: int = 0,
        ahead: float | None = None,
    ) -> KernelInfo | None:
        """The kernel of a linear layer for up to `tokens` tokens; None: take the library.

        `norm_apart`: the norm before it is made by another kernel in any case; with `squares`, the
        kernel before it has scaled x, and so many sums of squares a row say 1 / rms. `ahead` is the
        offset of a norm that this kernel may make: where the tile says so, it has scaled_ptr, bf16
        [tokens, rows], and scaled_squares_ptr, fp32 [tokens, the tile's `scaled`].

        With `parts`, the next kernel can add sums: where the tile says so, one with parts_ptr, fp32
        [tile's split, tokens, rows], takes the place of y.
        """
        ...

    def attention(self, shape: dict[str, Any], kind: str) -> tuple[KernelInfo, ...]:
        """The kernels of attention in a "decode" or "prefill" step, in order."""
        ...

    def make(self, template: str, **shape: Any) -> KernelInfo:
        """The kernel of any other template."""
        ...
