"""Memory: the place of every buffer in one arena, from lifetimes.

In: buffers with sizes and the steps between which they live. Out: their offsets. Buffers that live
at the same time never overlap; the largest are placed first, each in the lowest gap that fits.
"""

from dataclasses import dataclass, replace

from torch import fx

from sitsc.core.plan import ArenaBuffer
from sitsc.passes.cost import Sizes
from sitsc.passes.fxutil import is_view

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Arena:
    """Placed buffers and the size of the arena that holds them."""

    buffers: tuple[ArenaBuffer, ...]
    bytes: int


def aligned(size: int) -> int:
    """`size` rounded up to the alignment of the arena."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def plan_arena(buffers: list[ArenaBuffer]) -> Arena:
    """Give every buffer an offset; input offsets are ignored. Deterministic in names and sizes."""
    placed: list[ArenaBuffer] = []
    for buffer in sorted(buffers, key=lambda b: (-b.bytes, b.first, b.name)):
        busy = sorted(
            (other.offset, other.offset + aligned(other.bytes))
            for other in placed
            if other.first <= buffer.last and buffer.first <= other.last
        )
        placed.append(replace(buffer, offset=_lowest_gap(busy, aligned(buffer.bytes))))
    order = {buffer.name: index for index, buffer in enumerate(buffers)}
    placed.sort(key=lambda b: order[b.name])
    end = max((b.offset + aligned(b.bytes) for b in placed), default=0)
    return Arena(tuple(placed), end)


def _lowest_gap(busy: list[tuple[int, int]], size: int) -> int:
    start = 0
    for low, high in busy:
        if low - start >= size:
            return start
        start = max(start, high)
    return start


def graph_buffers(graph: fx.Graph, sizes: Sizes) -> list[ArenaBuffer]:
    """Every computed value with its lifetime in nodes; views keep their source alive."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    steps = {node: index for index, node in enumerate(nodes)}
    last = {node: steps[node] for node in nodes}
    for node in reversed(nodes):
        ends = [
            last.get(user, len(nodes)) if is_view(user) else steps.get(user, len(nodes))
            for user in node.users
        ]
        last[node] = max([last[node], *ends])
    buffers = []
    for node in nodes:
        size = 0 if is_view(node) else sizes.nbytes(node)
        if size:
            buffers.append(
                ArenaBuffer(node.name, "uint8", (size,), 0, size, steps[node], last[node])
            )
    return buffers
