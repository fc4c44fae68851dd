"""ATen operators that move values or make them of sizes, as ONNX nodes.

Each takes the builder and the arguments of a call by the names of its schema, and gives the name of
the result, or names of all.
"""

from collections.abc import Callable
from typing import Any

import torch

from sitsc.export.onnx_builder import INT64, Builder
from sitsc.export.onnx_values import Size, UnwrittenError, Value, computed

Arguments = dict[str, Any]
Operator = Callable[[Builder, Arguments], Any]
_END = 2**62


def same(b: Builder, a: Arguments) -> str:
    """A value as it is (copies, layouts, dropout of inference)."""
    return next(iter(a.values())).name


def unsqueeze(b: Builder, a: Arguments) -> str:
    """A new dimension of size one."""
    return b.unsqueeze(a["self"].name, a["dim"] % (a["self"].rank + 1))


def squeeze(b: Builder, a: Arguments) -> str:
    """Without dimensions of size one."""
    value, dims = a["self"], a.get("dim")
    dims = range(value.rank) if dims is None else dims
    axes = [d % value.rank for d in ([dims] if isinstance(dims, int) else dims)]
    axes = [axis for axis in axes if value.shape[axis] == 1]
    return b.node("Squeeze", value.name, b.constant(axes)) if axes else value.name


def reshape(b: Builder, a: Arguments) -> str:
    """Other sizes."""
    return b.reshape(a["self"].name, a["shape"] if "shape" in a else a["size"])


def transpose(b: Builder, a: Arguments) -> str:
    """Two dimensions exchanged."""
    value = a["self"]
    order = list(range(value.rank))
    one, two = (a.get(key, default) % value.rank for key, default in (("dim0", 0), ("dim1", 1)))
    order[one], order[two] = order[two], order[one]
    return b.transpose(value.name, order)


def permute(b: Builder, a: Arguments) -> str:
    """Dimensions in another order."""
    return b.transpose(a["self"].name, [d % a["self"].rank for d in a["dims"]])


def turned(b: Builder, a: Arguments) -> str:
    """A matrix transposed; a vector as it is."""
    value = a["self"]
    return b.transpose(value.name, [1, 0]) if value.rank == 2 else value.name


def expand(b: Builder, a: Arguments) -> str:
    """Broadcast; -1 keeps a size."""
    sizes = [1 if isinstance(size, int) and size == -1 else size for size in a["size"]]
    return b.node("Expand", a["self"].name, b.sizes(sizes))


def cut(b: Builder, a: Arguments) -> str:
    """slice.Tensor."""
    start, end = (0 if a["start"] is None else a["start"]), a["end"]
    end = _END if end is None else min(end, _END) if isinstance(end, int) else end
    return b.slice(a["self"].name, a["dim"] % a["self"].rank, start, end, a["step"])


def select(b: Builder, a: Arguments) -> str:
    """One index of a dimension."""
    index = a["index"].name if isinstance(a["index"], Size) else b.constant(a["index"])
    return b.node("Gather", a["self"].name, index, axis=a["dim"] % a["self"].rank)


def split(b: Builder, a: Arguments) -> list[str]:
    """Parts along a dimension of a known size."""
    value = a["self"]
    axis = a["dim"] % value.rank
    whole = value.shape[axis]
    sizes: Any = a["split_sizes"] if "split_sizes" in a else a["split_size"]
    if whole is None or isinstance(sizes, Size):
        raise UnwrittenError("of a free size")
    if isinstance(sizes, int):
        sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
    return b.nodes_of("Split", (value.name, b.sizes(sizes)), len(sizes), axis=axis)


def unbind(b: Builder, a: Arguments) -> list[str]:
    """All indices of a dimension of a known size."""
    value = a["self"]
    axis = a["dim"] % value.rank
    count = value.shape[axis]
    if count is None:
        raise UnwrittenError("of a free size")
    return [b.node("Gather", value.name, b.constant(i), axis=axis) for i in range(count)]


def concat(b: Builder, a: Arguments) -> str:
    """Tensors one after another, in their common type."""
    values: list[Value] = [v for v in a["tensors"] if v.shape != (0,)]
    dtype = values[0].metas[0].dtype
    for value in values[1:]:
        dtype = torch.promote_types(dtype, value.metas[0].dtype)
    names = [b.operand(value, computed(dtype)) for value in values]
    return b.node("Concat", *names, axis=a["dim"] % values[0].rank)


def stack(b: Builder, a: Arguments) -> str:
    """Tensors along a new dimension."""
    axis = a["dim"] % (a["tensors"][0].rank + 1)
    names = [b.unsqueeze(value.name, axis) for value in a["tensors"]]
    return b.node("Concat", *names, axis=axis)


def convert(b: Builder, a: Arguments) -> str:
    """Another type."""
    dtype = a.get("dtype")
    return a["self"].name if dtype is None else b.operand(a["self"], computed(dtype))


def embedding(b: Builder, a: Arguments) -> str:
    """Rows of a table."""
    return b.node("Gather", a["weight"].name, a["indices"].name, axis=0)


def index_select(b: Builder, a: Arguments) -> str:
    """Indices of a dimension."""
    return b.node("Gather", a["self"].name, a["index"].name, axis=a["dim"] % a["self"].rank)


def gather(b: Builder, a: Arguments) -> str:
    """GatherElements."""
    axis = a["dim"] % a["self"].rank
    return b.node("GatherElements", a["self"].name, a["index"].name, axis=axis)


def index(b: Builder, a: Arguments) -> str:
    """Indexing by tensors: one anywhere, or several at the first dimensions."""
    given = [(axis, item) for axis, item in enumerate(a["indices"]) if item is not None]
    if any(item.dtype == torch.bool for _, item in given):
        raise UnwrittenError("by a mask")
    if len(given) == 1:
        ((axis, item),) = given
        return b.node("Gather", a["self"].name, item.name, axis=axis)
    if [axis for axis, _ in given] != list(range(len(given))):
        raise UnwrittenError("by several tensors that are not the first")
    names = [b.operand(item, INT64) for _, item in given]
    common = names[0]
    for name in names[1:]:
        common = b.node("Add", common, name)
    zero = b.node("Mul", common, b.constant(0))
    parts = [b.unsqueeze(b.node("Add", name, zero), -1) for name in names]
    return b.node("GatherND", a["self"].name, b.node("Concat", *parts, axis=-1))


def repeat(b: Builder, a: Arguments) -> str:
    """Tile."""
    value, times = a["self"], a["repeats"]
    name = value.name
    if len(times) > value.rank:
        name = b.unsqueeze(name, *range(len(times) - value.rank))
    return b.node("Tile", name, b.sizes(times))


def repeat_interleave(b: Builder, a: Arguments) -> str:
    """Each index of a dimension several times in a row."""
    value, times = a["self"], a["repeats"]
    if a["dim"] is None or not isinstance(times, int):
        raise UnwrittenError("without a dimension")
    axis = a["dim"] % value.rank
    sizes = b.shape(value)
    wide = [*sizes[: axis + 1], times, *sizes[axis + 1 :]]
    known = sizes[axis]
    sizes[axis] = known * times if isinstance(known, int) else -1
    return b.reshape(b.node("Expand", b.unsqueeze(value.name, axis + 1), b.sizes(wide)), sizes)


def arange(b: Builder, a: Arguments) -> str:
    """Range."""
    numbers = [a.get("start", 0), a["end"], a.get("step", 1)]
    floating = any(isinstance(n, float) for n in numbers)
    dtype = a.get("dtype") or (torch.float32 if floating else INT64)
    wide = torch.float32 if floating else INT64
    made = b.node("Range", *(b.operand(n, wide) for n in numbers))
    return made if computed(dtype) == wide else b.cast(made, computed(dtype))


def filled(b: Builder, sizes: list[Any], number: Any, dtype: torch.dtype) -> str:
    """A tensor of one number."""
    value = b.operand(number, computed(dtype))
    return b.node("Expand", value, b.sizes(sizes)) if sizes else value


def full(b: Builder, a: Arguments) -> str:
    """full, new_full, full_like and those of zeros and ones, by the name of the call."""
    like = a.get("self")
    sizes = a.get("size")
    sizes = b.shape(like) if sizes is None and like is not None else sizes
    number = a["fill_value"]
    kind = like.metas[0].dtype if like is not None else _number_type(number)
    return filled(b, list(sizes or []), number, a.get("dtype") or kind)


def _number_type(number: Any) -> torch.dtype:
    if isinstance(number, bool):
        return torch.bool
    return torch.float32 if isinstance(number, float) else INT64


def _of(number: float, plain: torch.dtype = torch.float32) -> Operator:
    """zeros, ones and their like; without type and model of type float32."""

    def write(b: Builder, a: Arguments) -> str:
        dtype = a.get("dtype") or (plain if "self" not in a else None)
        return full(b, a | {"fill_value": number, "dtype": dtype})

    return write


def scalar(b: Builder, a: Arguments) -> str:
    """scalar_tensor."""
    dtype = a.get("dtype") or torch.float32
    return b.operand(a["s"], computed(dtype))


def triangle(b: Builder, a: Arguments, upper: int) -> str:
    """tril, triu."""
    value = a["self"]
    wide = INT64 if value.dtype == torch.bool else value.dtype
    made = b.node("Trilu", b.operand(value, wide), b.constant(a["diagonal"]), upper=upper)
    return made if wide == value.dtype else b.cast(made, value.dtype)


def cumulative(b: Builder, a: Arguments) -> str:
    """cumsum."""
    value = a["self"]
    integer = not value.dtype.is_floating_point
    dtype = a.get("dtype") or (INT64 if integer else value.dtype)
    axis = b.constant(a["dim"] % value.rank)
    return b.node("CumSum", b.operand(value, computed(dtype)), axis)


def flip(b: Builder, a: Arguments) -> str:
    """Dimensions backwards."""
    name = a["self"].name
    for dim in a["dims"]:
        name = b.slice(name, dim % a["self"].rank, -1, -_END, -1)
    return name


def pad(b: Builder, a: Arguments) -> str:
    """constant_pad_nd; amounts count from the last dimension."""
    value, amounts = a["self"], list(a["pad"])
    if a.get("mode", "constant") != "constant":
        raise UnwrittenError(f"by {a['mode']}")
    number = 0 if a["value"] is None else a["value"]
    pairs = [amounts[i : i + 2] for i in range(0, len(amounts), 2)][::-1]
    pairs = [[0, 0]] * (value.rank - len(pairs)) + pairs
    ends = b.sizes([pair[0] for pair in pairs] + [pair[1] for pair in pairs])
    return b.node("Pad", value.name, ends, b.operand(number, value.dtype), mode="constant")


def eye(b: Builder, a: Arguments) -> str:
    """The unit matrix."""
    dtype = computed(a.get("dtype") or torch.float32)
    count = a["n"]
    row = b.node("Range", b.constant(0), b.operand(count, INT64), b.constant(1))
    other = a.get("m", count)
    column = b.node("Range", b.constant(0), b.operand(other, INT64), b.constant(1))
    hit = b.node("Equal", b.unsqueeze(row, 1), column)
    return hit if dtype == torch.bool else b.cast(hit, dtype)


def where(b: Builder, a: Arguments) -> str:
    """where of tensors and numbers."""
    one, two = a["self"], a["other"]
    metas = [v.metas[0] if isinstance(v, Value) else v for v in (one, two)]
    dtype = computed(torch.result_type(*metas))
    return b.node("Where", a["condition"].name, b.operand(one, dtype), b.operand(two, dtype))


def masked_fill(b: Builder, a: Arguments) -> str:
    """A number where a mask is true."""
    value = a["self"]
    return b.node("Where", a["mask"].name, b.operand(a["value"], value.dtype), value.name)


SHAPE_OPS: dict[str, Operator] = {
    **dict.fromkeys(("clone.default", "alias.default", "detach.default"), same),
    **dict.fromkeys(("contiguous.default", "lift_fresh_copy.default", "dropout.default"), same),
    "unsqueeze.default": unsqueeze,
    **dict.fromkeys(("squeeze.default", "squeeze.dim", "squeeze.dims"), squeeze),
    **dict.fromkeys(("reshape.default", "view.default", "_unsafe_view.default"), reshape),
    "transpose.int": transpose,
    "permute.default": permute,
    "t.default": turned,
    "expand.default": expand,
    "slice.Tensor": cut,
    "select.int": select,
    **dict.fromkeys(("split.Tensor", "split_with_sizes.default"), split),
    "unbind.int": unbind,
    "cat.default": concat,
    "stack.default": stack,
    **dict.fromkeys(("_to_copy.default", "to.dtype"), convert),
    "embedding.default": embedding,
    "index_select.default": index_select,
    "gather.default": gather,
    "index.Tensor": index,
    "repeat.default": repeat,
    "repeat_interleave.self_int": repeat_interleave,
    **dict.fromkeys(("arange.default", "arange.start", "arange.start_step"), arange),
    **dict.fromkeys(("full.default", "full_like.default", "new_full.default"), full),
    **dict.fromkeys(("zeros.default", "zeros_like.default", "new_zeros.default"), _of(0)),
    **dict.fromkeys(("ones.default", "ones_like.default", "new_ones.default"), _of(1)),
    "scalar_tensor.default": scalar,
    "tril.default": lambda b, a: triangle(b, a, 0),
    "triu.default": lambda b, a: triangle(b, a, 1),
    "cumsum.default": cumulative,
    "flip.default": flip,
    **dict.fromkeys(("constant_pad_nd.default", "pad.default"), pad),
    **dict.fromkeys(("eye.default", "eye.m"), eye),
    "where.self": where,
    **dict.fromkeys(("where.ScalarOther", "where.ScalarSelf", "where.Scalar"), where),
    **dict.fromkeys(("masked_fill.Scalar", "masked_fill.Tensor"), masked_fill),
}
