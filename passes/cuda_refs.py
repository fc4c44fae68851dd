"""Places of values while launches are made: which buffer, from which byte, with which row stride.

Views of a value (reshape, select, split) are places in the same buffer; nothing is copied for them.
"""

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

from sitsc.core.errors import GraphError
from sitsc.core.weights import dtype_name
from sitsc.passes.cost import Sizes
from sitsc.passes.fxutil import is_op, tensor

Node = Any


@dataclass(frozen=True, slots=True)
class Ref:
    """A value in a buffer: `offset` in elements, `stride` elements from row to row."""

    source: str
    buffer: str
    dtype: str
    offset: int
    stride: int
    layer_stride: int = 0


VIEWS = ("reshape", "select", "split_with_sizes", "unsqueeze")


def is_view(node: Node) -> bool:
    """Whether a call only names a part of its first argument."""
    return is_op(node, *VIEWS) or node.target is operator.getitem


def view(node: Node, source: Any, sizes: Sizes) -> Any:
    """The place of a view; a split gives a list of places. Raises GraphError for other strides."""
    if node.target is operator.getitem:
        return source[node.args[1]]
    if is_op(node, "split_with_sizes"):
        return _split(node, source)
    shape = tensor(node.args[0]).shape
    if is_op(node, "unsqueeze"):
        return source
    if is_op(node, "select"):
        index, dim = node.args[2], node.args[1]
        if dim != 0:
            raise GraphError(f"a view of dimension {dim} has no kernel", hint="report the model")
        step = math.prod(sizes.of(size) for size in shape[1:])
        return replace(source, offset=source.offset + index * step)
    return _reshaped(node, source, sizes)


def _split(node: Node, source: Ref) -> list[Ref]:
    parts, at = [], 0
    for size in node.args[1]:
        parts.append(replace(source, offset=source.offset + at))
        at += size
    return parts


def _reshaped(node: Node, source: Ref, sizes: Sizes) -> Ref:
    """Rows stay rows, or the value is contiguous and the rows are of another width."""
    old = [sizes.of(size) for size in tensor(node.args[0]).shape]
    new = [sizes.of(size) for size in tensor(node).shape]
    width = old[-1]
    if source.stride == width and len(old) <= 3:
        rows = math.prod(old[:-1])
        if rows and math.prod(new) % rows == 0:
            return replace(source, stride=math.prod(new) // rows if _keeps(new, rows) else new[-1])
    return source


def _keeps(shape: list[int], rows: int) -> bool:
    """Whether the leading dimensions of a shape make exactly the rows."""
    count = 1
    for size in shape:
        if count == rows:
            return True
        count *= size
    return count == rows


def stored(node: Node, name: str, width: int) -> Ref:
    """A value in a buffer of its own, rows one after another."""
    return Ref("arena", name, dtype_name(tensor(node).dtype), 0, width)
