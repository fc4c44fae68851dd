"""Values of an ONNX graph that are no tensors here: shapes, and the arithmetic on them.

An integer, a float, a bool, a symbolic size, or a flat list of these stands for a tensor of rank 0
or 1. They are computed in Python, so that sizes stay symbolic and constants stay numbers; every
result is bounded, since a hostile graph can ask for any.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sitsc.core.errors import UnsupportedModelError

MAX_LIST = 4096
_MAX_OPERATIONS = 64
_MAX_INT = 2**63
Scalar = Any
Host = Any


def is_host(value: Any) -> bool:
    """Whether a value is a number or a list of numbers."""
    return not isinstance(value, Tensor)


def as_list(value: Any) -> list[Scalar]:
    """The items of a host value. Raises UnsupportedModelError for a tensor."""
    if isinstance(value, Tensor):
        raise UnsupportedModelError(
            "a shape depends on the values of a tensor",
            hint="export with dynamic shapes and without control flow over data",
        )
    return value if isinstance(value, list) else [value]


def as_int(value: Any) -> int:
    """One plain integer (an axis, an index)."""
    (item,) = as_list(value)
    return int(item)


def as_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of a value: numbers are written by operators, so that symbolic sizes may stand."""
    if isinstance(value, Tensor):
        return value if dtype is None else value.to(dtype)
    items = as_list(value)
    kind = dtype or kind_of(items)
    if not isinstance(value, list):
        return torch.full((), value, dtype=kind)
    if not items:
        return torch.empty(0, dtype=kind)
    return torch.cat([torch.full((1,), item, dtype=kind) for item in items])


def kind_of(items: list[Scalar]) -> torch.dtype:
    """The element type that a list of numbers stands for."""
    if any(isinstance(item, float | torch.SymFloat) for item in items):
        return torch.float32
    return torch.bool if items and isinstance(items[0], bool) else torch.int64


def bounded(value: Host) -> Host:
    """The value, when it is one that a real graph computes. Raises UnsupportedModelError."""
    items = value if isinstance(value, list) else [value]
    too_large = len(items) > MAX_LIST
    for item in items:
        if isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool):
            too_large |= int(item.node.expr.count_ops()) > _MAX_OPERATIONS
        elif isinstance(item, int):
            too_large |= not -_MAX_INT <= item < _MAX_INT
    if too_large:
        raise UnsupportedModelError("the arithmetic on shapes has no bounds")
    return value


def each(function: Callable[..., Scalar], *values: Host) -> Host:
    """`function` over the items, lists of one item and scalars broadcast."""
    if not any(isinstance(value, list) for value in values):
        return bounded(function(*values))
    lists = [as_list(value) for value in values]
    size = max(len(items) for items in lists)
    if any(len(items) not in (1, size) for items in lists):
        raise UnsupportedModelError(f"lists of {[len(i) for i in lists]} items do not broadcast")
    wide = [items * size if len(items) == 1 else items for items in lists]
    return bounded([function(*row) for row in zip(*wide, strict=True)])


def divide(x: Scalar, y: Scalar) -> Scalar:
    """x / y; of integers rounded towards zero."""
    if isinstance(x, float | torch.SymFloat) or isinstance(y, float | torch.SymFloat):
        return x / y if not (isinstance(y, float) and y == 0) else math.nan
    if isinstance(y, int) and y == 0:
        raise UnsupportedModelError("a size is divided by zero")
    if isinstance(x, int) and isinstance(y, int) and (x < 0) != (y < 0):
        return -(abs(x) // abs(y))
    return x // y


def power(x: Scalar, y: Scalar) -> Scalar:
    """x to the power y, of numbers small enough to be a size."""
    if isinstance(x, int) and isinstance(y, int) and not (0 <= y <= 64 and abs(x) < 2**32):
        raise UnsupportedModelError(f"a size is computed as {x} to the power {y}")
    try:
        return x**y
    except (OverflowError, ZeroDivisionError) as error:
        raise UnsupportedModelError("a power has no value") from error


def choose(condition: Scalar, x: Scalar, y: Scalar) -> Scalar:
    """x where a condition holds, else y."""
    return x if bool(condition) else y


BINARY: dict[str, Callable[[Scalar, Scalar], Scalar]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": divide,
    "Pow": power,
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "And": operator.and_,
    "Or": operator.or_,
    "Max": lambda x, y: torch.sym_max(x, y),
    "Min": lambda x, y: torch.sym_min(x, y),
    "Mod": operator.mod,
}


def _root(x: Scalar) -> float:
    return math.sqrt(float(x)) if x >= 0 else math.nan


UNARY: dict[str, Callable[[Scalar], Scalar]] = {
    "Sqrt": _root,
    "Neg": operator.neg,
    "Abs": abs,
    "Not": operator.not_,
    "Identity": lambda x: x,
    "Reciprocal": lambda x: divide(1.0, float(x)),
    "Floor": lambda x: float(math.floor(x)),
    "Ceil": lambda x: float(math.ceil(x)),
}


def cast(value: Host, dtype: torch.dtype) -> Host:
    """Numbers as another type."""

    def one(item: Scalar) -> Scalar:
        if dtype.is_floating_point:
            return item if isinstance(item, float) else torch.sym_float(item)
        if dtype == torch.bool:
            return bool(item)
        return item if isinstance(item, torch.SymInt) else int(item)

    try:
        return each(one, value)
    except (OverflowError, ValueError) as error:
        raise UnsupportedModelError("a number cannot be cast") from error
