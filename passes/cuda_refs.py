"""Places of values while launches are made: which buffer, from which element, with which strides.

Views of a value are places in the same buffer: the view is taken of a tensor without storage that
has the strides of the place. Nothing is copied for them.
"""

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from sitsc.core.weights import DTYPES
from sitsc.passes.cost import Sizes
from sitsc.passes.fxutil import is_op, tensor

Node = Any
VIEWS = ("reshape", "view", "_unsafe_view", "unsqueeze", "squeeze", "select", "slice", "transpose")
VIEWS += ("permute", "t", "expand", "split_with_sizes", "split", "chunk", "alias", "detach")
_BY_SHAPE = ("reshape", "view", "_unsafe_view", "expand")


@dataclass(frozen=True, slots=True)
class Ref:
    """A value in a buffer: `offset` and `strides` in elements, sizes of the largest step.

    Step inputs, pools and scratch are named whole and have no sizes. A weight may be the
    `following` layer's.
    """

    source: str
    buffer: str
    dtype: str
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    layer_stride: int = 0
    following: bool = False

    @property
    def contiguous(self) -> bool:
        """Whether the elements stand one after another in the order of the sizes."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def rows(self) -> "Ref":
        """A contiguous place as rows: all sizes but the last make one."""
        count, width = math.prod(self.shape[:-1]), self.shape[-1]
        return replace(self, shape=(count, width), strides=(width, 1))

    def same_elements(self, other: "Ref") -> bool:
        """Whether both are the same elements of one buffer."""
        same = (self.source, self.buffer, self.dtype) == (other.source, other.buffer, other.dtype)
        return same and self.offset == other.offset and _steps(self) == _steps(other)


def _steps(ref: Ref) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(ref.shape, ref.strides, strict=True) if n != 1]


def packed(shape: tuple[int, ...], first: int | None) -> tuple[int, ...]:
    """Strides without gaps, where dimension `first` (the tokens) is the outermost in memory."""
    order = [] if first is None else [first]
    order += [index for index in range(len(shape)) if index != first]
    strides, step = [0] * len(shape), 1
    for index in reversed(order):
        strides[index] = step
        step *= shape[index]
    return tuple(strides)


def is_view(node: Node) -> bool:
    """Whether a call only names a part of its first argument."""
    return is_op(node, *VIEWS) or getattr(node, "target", None) is operator.getitem


def view(node: Node, source: Any, sizes: Sizes) -> Any:
    """The place of a view, a list of places for a split; None when it would need a copy."""
    if node.target is operator.getitem:
        return source[node.args[1]]
    base = torch.empty_strided(
        source.shape, source.strides, dtype=DTYPES[source.dtype], device="meta"
    )
    if is_op(node, *_BY_SHAPE):
        shape = [sizes.of(size) for size in tensor(node).shape]
        made = base.expand(shape) if is_op(node, "expand") else base.reshape(shape)
    else:
        args = [_number(arg, sizes) for arg in node.args[1:]]
        made = node.target(base, *args, **node.kwargs)
    if not isinstance(made, torch.Tensor):
        return [_part(source, one) for one in made]
    shared = made.untyped_storage()._cdata == base.untyped_storage()._cdata
    return _part(source, made) if shared else None


def _part(source: Ref, made: torch.Tensor) -> Ref:
    return replace(
        source,
        offset=source.offset + int(made.storage_offset()),
        shape=tuple(made.shape),
        strides=tuple(made.stride()),
    )


def _number(arg: Any, sizes: Sizes) -> Any:
    if isinstance(arg, fx.Node):
        arg = arg.meta["val"]
    if isinstance(arg, (list, tuple)):
        return [_number(item, sizes) for item in arg]
    return sizes.of(arg) if isinstance(arg, torch.SymInt) else arg


def side_by_side(refs: list[Any]) -> bool:
    """Whether q, k and v [tokens, heads, dim] fill the rows of one buffer from its start."""
    if any(not isinstance(ref, Ref) or ref.source != "arena" for ref in refs):
        return False
    at, width = 0, sum(ref.shape[1] * ref.shape[2] for ref in refs)
    for ref in refs:
        expected = packed(ref.shape[1:], None)
        heads_ok = ref.strides[1] == expected[0] or ref.shape[1] == 1
        if ref.buffer != refs[0].buffer or ref.offset != at or ref.strides[0] != width:
            return False
        if ref.strides[2] != 1 or not heads_ok:
            return False
        at += ref.shape[1] * ref.shape[2]
    return True
