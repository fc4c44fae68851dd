"""Tokens of an imported graph: positions come from the step, and tokens meet in attention alone.

A step holds tokens of several sequences. So counting 0, 1, 2 … over the tokens is replaced by the
positions of the step, and any other operator that looks across tokens is refused by name.
"""

from typing import Any

import torch
from torch import Tensor, fx

from sitsc.core.errors import UnsupportedModelError
from sitsc.frontend.onnx_attention import is_call
from sitsc.frontend.onnx_values import TokenValues

aten: Any = torch.ops.aten
_COUNTS = (5, 11, 4104)  # the last one for positions that are cut off or begin again
# Operators that move values without joining those of different tokens.
_MOVING = ("reshape", "view", "_unsafe_view", "transpose", "permute", "unsqueeze", "squeeze")
_MOVING += ("expand", "clone", "contiguous", "detach", "alias", "t", "numpy_T", "_to_copy", "to")
_MOVING += ("linear", "embedding", "dropout", "attention", "moe")
# Operators along a dimension, and where that stands among their arguments.
_ALONG = {"slice": 1, "select": 1, "split": 2, "split_with_sizes": 2, "chunk": 2, "cat": 1}
_ALONG |= {"softmax": 1, "_softmax": 1, "mean": 1, "sum": 1, "amax": 1, "amin": 1, "stack": 1}
_ALONG |= {"linalg_vector_norm": 2, "cumsum": 1, "index_select": 1, "gather": 1, "flip": 1}
_FILLED = ("full", "ones", "zeros", "scalar_tensor", "empty")


def use_positions(graph: fx.Graph, values: TokenValues) -> None:
    """Read positions from the step wherever the graph counts its tokens itself."""
    (positions,) = (n for n in graph.nodes if n.op == "placeholder" and n.name == "position_ids")
    counted = values.without_positions()
    for node in list(graph.nodes):
        if node not in counted or not _may_count(node):
            continue
        if not all(_counts(values.compute(node, tokens), tokens) for tokens in _COUNTS):
            continue
        with graph.inserting_before(node):
            new = _like(graph, positions, node)
        node.replace_all_uses_with(new)


def _may_count(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype == torch.bool or not 0 < value.dim() < 3:
        return False
    return not isinstance(value.shape[-1], int) and (value.dim() == 1 or value.shape[0] == 1)


def _counts(value: Tensor, tokens: int) -> bool:
    flat = value.reshape(-1)
    return flat.numel() == tokens and torch.equal(flat.double(), torch.arange(tokens).double())


def _like(graph: fx.Graph, positions: fx.Node, node: fx.Node) -> fx.Node:
    """The positions in the shape and type of `node`."""
    value, new = node.meta["val"], positions
    steps = []
    if value.dim() == 2:
        steps.append((aten.unsqueeze.default, (0,), {}))
    if value.dtype != torch.int64:
        steps.append((aten._to_copy.default, (), {"dtype": value.dtype}))
    for target, args, kwargs in steps:
        source = new
        new = graph.call_function(target, (source, *args), kwargs)
        with source.meta["val"].fake_mode:
            new.meta["val"] = target(source.meta["val"], *args, **kwargs)
    return new


def check_rows(graph: fx.Graph) -> None:
    """Raises UnsupportedModelError for a call that may join values of different tokens."""
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor | list | tuple):
            if not _keeps_rows(node):
                raise UnsupportedModelError(
                    f"{getattr(node.target, '__name__', node.target)} looks across tokens",
                    hint="only attention may, in a decoder whose tokens are served in batches",
                )


def _free(value: Any) -> list[int]:
    """The dimensions of a tensor that move with the number of tokens."""
    shape = getattr(value, "shape", ())
    return [i for i, size in enumerate(shape) if not isinstance(size, int)]


def _keeps_rows(node: fx.Node) -> bool:
    values = node.meta["val"]
    parts = list(values) if isinstance(values, list | tuple) else [values]
    target: Any = node.target
    name = target._schema.name.split("::")[-1] if hasattr(target, "_schema") else ""
    sources = [n.meta.get("val") for n in node.all_input_nodes]
    moved = any(_free(value) for value in [*parts, *sources])
    if not moved or name == "":  # getitem
        return True
    if any(len(_free(part)) > 1 for part in parts):
        return False
    if torch.Tag.pointwise in target.tags:
        return not any(isinstance(v, torch.SymInt) for v in sources)
    if name in _MOVING or name in _FILLED or name.startswith("sym_"):
        return True
    if name == "index":
        return _selects_logits(node)
    if name in ("layer_norm", "native_layer_norm", "rms_norm"):
        return True
    if name in _ALONG:
        return _along(node, _ALONG[name])
    return name in ("matmul", "bmm", "mm") and _product_keeps(node)


def _selects_logits(node: fx.Node) -> bool:
    """Whether an index is the one that takes the rows for logits."""
    chosen: Any = node.args[1]
    given = [n for n in chosen if n is not None]
    return len(given) == 1 and given[0].name == "logit_rows"


def _along(node: fx.Node, place: int) -> bool:
    """Whether an operator works along dimensions of a fixed size."""
    source: Any = node.args[0]
    value = (source[0] if isinstance(source, list | tuple) else source).meta["val"]
    names = ["dim", "dims"]
    dims: Any = next((node.kwargs[n] for n in names if n in node.kwargs), None)
    if dims is None:
        default = None if is_call(node, "mean", "sum") else 0
        dims = node.args[place] if len(node.args) > place else default
    if dims is None:
        return False
    rank = value.dim() + is_call(node, "stack")
    at = [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])]
    return bool(at) and not set(at) & set(_free(value))


def _product_keeps(node: fx.Node) -> bool:
    """Whether a product sums over a fixed size, with one side that has no tokens but its own."""
    one, two = (n.meta["val"] for n in node.args[:2])  # pyright: ignore
    joined = {one.dim() - 1} & set(_free(one)) or {max(0, two.dim() - 2)} & set(_free(two))
    return not joined
