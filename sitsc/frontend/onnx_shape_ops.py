"""ONNX operators that move values or compute shapes, on tensors and on host values alike.

Each takes a `Call` and gives the value of its output, or a tuple of values.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sitsc.frontend.onnx_call import Call
from sitsc.frontend.onnx_file import DTYPES
from sitsc.frontend.onnx_host import as_int, as_list, as_tensor, bounded, cast, is_host


def shape(call: Call) -> Any:
    """The sizes from `start` to `end`."""
    value = call.value(0)
    sizes = ([len(value)] if isinstance(value, list) else []) if is_host(value) else value.shape
    return list(sizes)[call.get("start", 0) : call.get("end", None)]


def size(call: Call) -> Any:
    """The number of elements."""
    value = call.value(0)
    return len(as_list(value)) if is_host(value) else bounded(math.prod(value.shape))


def convert(call: Call) -> Any:
    """Cast; of numbers to a type of the same kind they stay numbers."""
    call.get("saturate", 1)
    number = call.get("to")
    call.require(number in DTYPES, f"type {number}")
    value, dtype = call.value(0), call.computed(DTYPES[number])
    return cast(value, dtype) if is_host(value) else value.to(dtype)


def convert_like(call: Call) -> Any:
    """CastLike: input 0 in the type of input 1."""
    call.get("saturate", 1)
    return call.tensor(0).to(call.tensor(1).dtype)


def concat(call: Call) -> Any:
    """Concat; parts of size 0 (a past that is empty) are left out."""
    axis, values = call.get("axis"), call.inputs
    if all(is_host(value) for value in values):
        return bounded([item for value in values for item in as_list(value)])
    parts = [call.tensor(i) for i in range(len(values))]
    kept = [part for part in parts if not _is_empty(part, axis)] or parts[:1]
    return kept[0] if len(kept) == 1 else torch.cat(kept, axis)


def _is_empty(part: Tensor, axis: int) -> bool:
    count = part.shape[axis]
    return isinstance(count, int) and count == 0


def gather(call: Call) -> Any:
    """Gather along one axis; of a table by the ids of tokens it is an embedding."""
    value, index, axis = call.value(0), call.value(1), call.get("axis", 0)
    if isinstance(value, list) and is_host(index):
        call.require(all(isinstance(i, int) for i in as_list(index)), "a symbolic index")
        call.require(all(-len(value) <= i < len(value) for i in as_list(index)), "a wild index")
        found = [value[i] for i in as_list(index)]
        return found if isinstance(index, list) else found[0]
    source = call.tensor(0)
    if is_host(index) and not isinstance(index, list):
        return source.select(axis, index)
    if is_host(index):  # places that count from the end are none that torch takes
        size = source.shape[axis]
        index = [i + size if isinstance(i, int) and i < 0 else i for i in index]
    at = as_tensor(index)
    if axis % source.dim() == 0 and source.dim() == 2:
        return F.embedding(at, source)
    axis %= source.dim()
    flat = torch.index_select(source, axis, at.reshape(-1))
    return flat.reshape(*source.shape[:axis], *at.shape, *source.shape[axis + 1 :])


def gather_nd(call: Call) -> Any:
    """GatherND without batch dimensions."""
    call.require(call.get("batch_dims", 0) == 0, "batch_dims")
    source, index = call.tensor(0), call.tensor(1)
    return source[tuple(index[..., i] for i in range(index.shape[-1]))]


def gather_elements(call: Call) -> Any:
    """GatherElements."""
    return torch.gather(call.tensor(0), call.get("axis", 0), call.tensor(1))


def squeeze(call: Call) -> Any:
    """Squeeze the axes given, or all of size one."""
    value = call.value(0)
    if is_host(value):
        return as_list(value)[0]
    if call.has(1):
        return value.squeeze(tuple(as_list(call.value(1))))
    return value.squeeze()


def unsqueeze(call: Call) -> Any:
    """Unsqueeze; a number becomes a list of one."""
    value, axes = call.value(0), as_list(call.value(1))
    if is_host(value) and not isinstance(value, list) and len(axes) == 1:
        return [value]
    result = as_tensor(value)
    rank = result.dim() + len(axes)
    for axis in sorted(int(axis) % rank for axis in axes):
        result = result.unsqueeze(axis)
    return result


def reshape(call: Call) -> Any:
    """Reshape; 0 keeps a size unless `allowzero`."""
    value, sizes = call.value(0), as_list(call.value(1))
    literal = call.get("allowzero", 0)
    if is_host(value) and len(sizes) == 1:
        return as_list(value)
    source = as_tensor(value)
    keep = [isinstance(s, int) and s == 0 and not literal for s in sizes]
    return source.reshape([source.shape[i] if keep[i] else s for i, s in enumerate(sizes)])


def flatten(call: Call) -> Any:
    """Flatten to two dimensions."""
    source, axis = call.tensor(0), call.get("axis", 1)
    axis = axis if axis >= 0 else axis + source.dim()
    rows = source.shape[:axis]
    return source.reshape(math.prod(rows), -1)


def expand(call: Call) -> Any:
    """Expand by the rules of broadcasting: a size of one here leaves the size as it is."""
    source, sizes = call.tensor(0), list(as_list(call.value(1)))
    own = list(source.shape)
    rank = max(len(own), len(sizes))
    own, sizes = [1] * (rank - len(own)) + own, [1] * (rank - len(sizes)) + sizes
    wide = [a if isinstance(b, int) and b == 1 else b for a, b in zip(own, sizes, strict=True)]
    return source.expand(wide)


def tile(call: Call) -> Any:
    """Tile."""
    return call.tensor(0).repeat(as_list(call.value(1)))


def transpose(call: Call) -> Any:
    """Transpose; the order is reversed by default. Two swapped axes are written as such."""
    source = call.tensor(0)
    order = list(call.get("perm", list(range(source.dim()))[::-1]))
    moved = [i for i, axis in enumerate(order) if i != axis]
    return source.transpose(*moved) if len(moved) == 2 else source.permute(order)


def cut(call: Call) -> Any:
    """Slice."""
    value, starts, ends = call.value(0), as_list(call.value(1)), as_list(call.value(2))
    axes = as_list(call.value(3, list(range(len(starts)))))
    steps = as_list(call.value(4, [1] * len(starts)))
    if is_host(value):
        items = as_list(value)
        return items[slice(int(starts[0]), int(ends[0]), int(steps[0]))]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        call.require(isinstance(step, int) and step > 0, "a step that is not positive")
        value = torch.ops.aten.slice.Tensor(value, axis, start, end, step)
    return value


def split(call: Call) -> Any:
    """Split into sizes, or into equal parts."""
    source, axis = call.tensor(0), call.get("axis", 0)
    count = call.get("num_outputs", call.num_outputs)
    if call.has(1):
        return tuple(torch.split(source, as_list(call.value(1)), axis))
    call.require(0 < count <= 4096, "so many outputs")
    return tuple(torch.split(source, -(-source.shape[axis] // count), axis))


def arange(call: Call) -> Any:
    """Range."""
    start, stop, step = (call.value(i) for i in range(3))
    bounds = [as_list(v)[0] for v in (start, stop, step)]
    return torch.arange(*bounds)


def constant_of_shape(call: Call) -> Any:
    """ConstantOfShape; a short list of integers stays a host value."""
    fill, dtype = call.get("value", (0.0, torch.float32))
    sizes = as_list(call.value(0))
    short = len(sizes) == 1 and isinstance(sizes[0], int) and 0 < sizes[0] <= 16
    if dtype == torch.int64 and short:
        return [fill] * sizes[0]
    return torch.full(sizes, fill, dtype=call.computed(dtype))


def triangle(call: Call) -> Any:
    """Trilu."""
    diagonal = as_int(call.value(1, 0))
    cut_off = torch.triu if call.get("upper", 1) else torch.tril
    return cut_off(call.tensor(0), diagonal)


def cumulative(call: Call) -> Any:
    """CumSum."""
    call.require(not call.get("exclusive", 0) and not call.get("reverse", 0), "exclusive, reverse")
    return torch.cumsum(call.tensor(0), as_int(call.value(1)))


def scatter_nd(call: Call) -> Any:
    """ScatterND without a reduction."""
    call.require(call.get("reduction", "none") == "none", "a reduction")
    source, index = call.tensor(0), call.tensor(1)
    parts = tuple(index[..., i] for i in range(index.shape[-1]))
    return torch.index_put(source, parts, call.tensor(2))


SHAPE_OPS: dict[str, Callable[[Call], Any]] = {
    "Shape": shape,
    "Size": size,
    "Cast": convert,
    "CastLike": convert_like,
    "Concat": concat,
    "Gather": gather,
    "GatherND": gather_nd,
    "GatherElements": gather_elements,
    "Squeeze": squeeze,
    "Unsqueeze": unsqueeze,
    "Reshape": reshape,
    "Flatten": flatten,
    "Expand": expand,
    "Tile": tile,
    "Transpose": transpose,
    "Slice": cut,
    "Split": split,
    "Range": arange,
    "ConstantOfShape": constant_of_shape,
    "Trilu": triangle,
    "CumSum": cumulative,
    "ScatterND": scatter_nd,
}
