"""Tokens meet in attention alone: whatever else mixes the tokens of a step is refused.

A step holds tokens of several sequences, and a sequence comes in several steps. A convolution, a
shift or a sum over tokens would mix sequences and lose what came before, so that a graph may only
treat each token by itself between its attention operators, and may not compute with their number.
"""

from typing import Any

import torch
from torch import Tensor, fx

from sitsc.core.errors import UnsupportedModelError

# Operators over one dimension: where it stands among the arguments.
_ALONG = {
    "cumsum": 1,
    "cumprod": 1,
    "flip": 1,
    "roll": 2,
    "sort": 1,
    "topk": 2,
    "_softmax": 1,
    "softmax": 1,
    "logcumsumexp": 1,
}
_PRODUCTS = ("mm", "bmm", "matmul", "addmm", "baddbmm", "dot", "mv")
_PICKS = ("index", "index_select", "gather", "scatter", "scatter_add", "index_add")
_CONVOLUTIONS = ("convolution", "conv1d", "conv2d", "_convolution")
# Types of arguments that are computed with, in place of saying how large a tensor is.
_VALUES = ("Tensor", "number", "float")
Node = Any


def check_tokens_apart(graph: fx.Graph) -> None:
    """Raise UnsupportedModelError for an operator that mixes tokens and is not attention.

    Also for one that computes with the number of tokens: a step has its own.
    """
    [tokens] = graph.find_nodes(op="placeholder", target="token_ids")
    symbol = str(tokens.meta["val"].shape[0])
    for node in _needed(graph):
        schema = getattr(node.target, "_schema", None)
        if node.op != "call_function" or schema is None or schema.name.startswith("sitsc::"):
            continue
        if not isinstance(node.meta.get("val"), Tensor | tuple | list):
            continue
        if _reads_count(node, symbol):
            raise UnsupportedModelError(
                f"{schema.name} computes with the number of tokens",
                where=_place(node),
                hint="a step holds some tokens of several sequences; positions may be read",
            )
        if _mixes(node, schema.name.split("::")[1], symbol):
            raise UnsupportedModelError(
                f"{schema.name} mixes the tokens of a step",
                where=_place(node),
                hint="tokens may meet in attention alone: convolutions, shifts and sums over "
                "tokens cannot be compiled",
            )


def _place(node: Node) -> str:
    """The path of the module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("model.") if stack else ""


def _reads_count(node: Node, symbol: str) -> bool:
    """Whether the number of tokens is a value here, not a size."""
    arguments = node.target._schema.arguments
    kinds = {a.name: str(a.type) for a in arguments}
    given = {a.name: v for a, v in zip(arguments, node.args, strict=False)} | node.kwargs
    return any(
        isinstance(value, fx.Node)
        and isinstance(value.meta.get("val"), torch.SymInt | torch.SymFloat)
        and symbol in str(value.meta["val"])
        and kinds[name].removeprefix("Optional[").removesuffix("]") in _VALUES
        for name, value in given.items()
    )


def _needed(graph: fx.Graph) -> list[Node]:
    """The nodes that the result is computed from."""
    found: set[Node] = set()
    waiting = [graph.output_node()]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return [node for node in graph.nodes if node in found]


def _mixes(node: Node, name: str, symbol: str) -> bool:
    inputs = [n for n in node.all_input_nodes if _dims(n, symbol)]
    if not inputs or name.startswith("new_"):  # of the latter nothing but the type is read
        return False
    if name in _CONVOLUTIONS:
        return any(dim > 0 for dim in _dims(inputs[0], symbol))
    if name in ("constant_pad_nd", "pad"):
        return _pads_tokens(node, symbol)
    if name in _PRODUCTS and _contracts(node, symbol):
        return True
    if name in _PICKS:
        return _picks_tokens(node, name, symbol)
    if name in _ALONG and _over(node, _ALONG[name], inputs[0], symbol):
        return True
    return not all(_kept(v, symbol) for v in _values(node) if not any(map(_is_zero, v.shape)))


def _values(node: Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, tuple | list) else [value]) if _is_tensor(v)]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _dims(node: Node, symbol: str) -> list[int]:
    """The dimensions of a node's first value that follow the number of tokens."""
    values = _values(node)
    sizes = values[0].shape if values else ()
    return [d for d, s in enumerate(sizes) if isinstance(s, torch.SymInt) and symbol in str(s)]


def _kept(value: Tensor, symbol: str) -> bool:
    """Whether exactly one dimension counts tokens, or a multiple of them."""
    sizes = [str(s) for s in value.shape if isinstance(s, torch.SymInt) and symbol in str(s)]
    parts = sizes[0].split("*") if len(sizes) == 1 else []
    return symbol in parts and all(part == symbol or part.isdigit() for part in parts)


def _pads_tokens(node: Node, symbol: str) -> bool:
    """Whether rows are added before or after the tokens, or cut off there."""
    rank, by = len(_values(node.args[0])[0].shape), node.args[1]
    padded = {rank - 1 - i // 2 for i, count in enumerate(by) if not _is_zero(count)}
    return bool(padded & set(_dims(node.args[0], symbol)))


def _is_zero(count: Any) -> bool:
    return type(count) is int and count == 0


def _contracts(node: Node, symbol: str) -> bool:
    """Whether a product sums over tokens."""
    left, right = [a for a in node.args if isinstance(a, fx.Node)][-2:]
    rank = len(_values(left)[0].shape)
    other = len(_values(right)[0].shape)
    return rank - 1 in _dims(left, symbol) or max(other - 2, 0) in _dims(right, symbol)


def _over(node: Node, position: int, source: Node, symbol: str) -> bool:
    """Whether an operator works along a dimension of tokens."""
    rank = len(_values(source)[0].shape)
    over = node.args[position] if len(node.args) > position else node.kwargs.get("dim", -1)
    over = over if isinstance(over, list | tuple) else [over]
    return any(d % rank in _dims(source, symbol) for d in over if isinstance(d, int))


def _picks_tokens(node: Node, name: str, symbol: str) -> bool:
    """Whether rows of tokens are chosen by anything but the rows that want logits."""
    source = node.args[0]
    dims = _dims(source, symbol)
    if not dims:
        return False
    if name == "index":
        picked = [(d, index) for d, index in enumerate(node.args[1]) if index is not None]
    else:
        picked = [(node.args[1] % len(_values(source)[0].shape), node.args[2])]
    return any(d in dims and not _is_rows(index) for d, index in picked)


def _is_rows(index: Node) -> bool:
    """Whether an index is the step's own: rows that want logits."""
    while index.op == "call_function" and len(index.all_input_nodes) == 1:
        index = index.all_input_nodes[0]
    return index.op == "placeholder" and index.meta.get("input") == "logit_rows"
