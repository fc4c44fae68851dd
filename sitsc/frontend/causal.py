"""scaled_dot_product_attention of a decoder as sitsc::attention: causal, or with a window.

A mask is computed at the longest context and compared with what causal attention sees; whatever
differs is refused by name. Keys and values that were repeated for groups of heads are taken from
before.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core.errors import UnsupportedModelError
from sitsc.core.weights import materialise

_HIDDEN = -1e4  # a mask this low leaves nothing after softmax
_SHAPE_ONLY = ("_like", "aten.new_")
_CASTS = ("aten.clone", "aten.contiguous")
aten: Any = torch.ops.aten
Node = Any


def is_sdpa(node: Node) -> bool:
    """Whether a node calls torch's attention."""
    return node.target is aten.scaled_dot_product_attention.default


def place_of(node: Node) -> str:
    """The path of the module that a node comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("model.") if stack else ""


class Causal:
    """The attention of one graph; `symbol` is the number of tokens."""

    def __init__(self, graph: fx.Graph, weights: dict[str, Tensor], symbol: Any) -> None:
        self._graph, self._weights, self._symbol = graph, weights, symbol
        self._windows: dict[Node, int] = {}

    def rewrite(self, context: int) -> None:
        """Replace every call, for contexts up to `context`. Raises UnsupportedModelError."""
        found = [node for node in self._graph.nodes if is_sdpa(node)]
        if not found:
            raise UnsupportedModelError(
                "the module never calls scaled_dot_product_attention",
                hint="a decoder attends through it; compile other modules without decoder=True",
            )
        for layer, node in enumerate(found):
            self._replace(node, layer, context)
        self._graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))

    def _replace(self, node: Node, layer: int, context: int) -> None:
        values = _arguments(node)
        q, k, v = values["query"], values["key"], values["value"]
        self._check_shapes(node, q, k, v)
        if values["dropout_p"]:
            raise UnsupportedModelError(
                f"dropout of {values['dropout_p']} in attention",
                where=place_of(node),
                hint="0.0 unless self.training",
            )
        window = self._window(node, values, context)
        scale = values["scale"]
        scale = q.meta["val"].shape[-1] ** -0.5 if scale is None else float(scale)
        graph = self._graph
        with graph.inserting_before(node):
            k, v = _ungrouped(graph, q, k, v)
            args = (q, k, v, None, layer, scale, window, 0.0)
            seen = _call(graph, torch.ops.sitsc.attention.default, args, node)
            new = _call(graph, aten.transpose.int, (seen, 1, 2), node)
        for user in list(node.users):
            if _is(user, "aten.transpose") and {d % 4 for d in user.args[1:]} == {1, 2}:
                user.replace_all_uses_with(seen)
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def _check_shapes(self, node: Node, q: Node, k: Node, v: Node) -> None:
        for name, item in (("queries", q), ("keys", k), ("values", v)):
            shape = item.meta["val"].shape
            fits = len(shape) == 4 and str(shape[0]) == "1" and str(shape[2]) == str(self._symbol)
            if not fits or not all(isinstance(shape[i], int) for i in (1, 3)):
                raise UnsupportedModelError(
                    f"{name} {[str(s) for s in shape]} are not [1, heads, tokens, head_dim]",
                    where=place_of(node),
                    hint="attention over something else than the tokens of the sequence",
                )

    def _window(self, node: Node, values: dict[str, Any], context: int) -> int:
        """How many tokens are seen, 0 for all before. Raises UnsupportedModelError."""
        mask = values["attn_mask"]
        if mask is None:
            if values["is_causal"]:
                return 0
            raise UnsupportedModelError(
                "attention sees later tokens: neither is_causal nor a mask",
                where=place_of(node),
                hint="a decoder's attention is causal; encoders compile without decoder=True",
            )
        if mask not in self._windows:
            value = self.evaluate(mask, context)
            if value is None:
                raise UnsupportedModelError(
                    "the attention mask depends on the tokens",
                    where=place_of(node),
                    hint="one sequence has no padding: a causal mask is made of positions alone",
                )
            self._windows[mask] = _window_of(value, place_of(node))
        return self._windows[mask]

    def evaluate(self, node: Node, tokens: int) -> Tensor | None:
        """The value of a node when there are so many tokens; None if it depends on which."""
        values: dict[Node, Any] = {}
        try:
            for item in _needed(node):
                values[item] = self._value(item, values, tokens)
        except _DependsOnTokens:
            return None
        return values[node]

    def _value(self, node: Node, values: dict[Node, Any], tokens: int) -> Any:
        fake = node.meta.get("val")
        if isinstance(fake, torch.SymInt | int):
            return self._size(fake, tokens)
        if node.op == "placeholder":
            spec = node.meta.get("weight")
            if spec is None:
                raise _DependsOnTokens
            return materialise(spec, lambda name, start, stop: self._weights[name][start:stop])
        if any(word in str(node.target) for word in _SHAPE_ONLY):
            source = node.args[0].meta["val"]
            shape = [self._size(size, tokens) for size in source.shape]
            like = torch.empty(shape, dtype=source.dtype)
            return node.target(like, *map_arg(node.args[1:], values.__getitem__), **node.kwargs)
        args = map_arg(node.args, values.__getitem__)
        with torch.no_grad():
            return node.target(*args, **map_arg(node.kwargs, values.__getitem__))

    def _size(self, size: Any, tokens: int) -> int:
        if isinstance(size, int):
            return size
        expression = size.node.expr.subs({self._symbol.node.expr: tokens})
        return int(expression)


class _DependsOnTokens(Exception):
    """A value that was asked for depends on token ids."""


def _needed(node: Node) -> list[Node]:
    """A node and all that it is computed from, in order; what only lends its shape is left out."""
    found: dict[Node, None] = {}

    def visit(item: Node) -> None:
        if item in found:
            return
        if not isinstance(item.meta.get("val"), torch.SymInt | int):
            shape_only = any(word in str(item.target) for word in _SHAPE_ONLY)
            for source in item.all_input_nodes:
                if not (shape_only and source is item.args[0]):
                    visit(source)
        found[item] = None

    visit(node)
    return list(found)


def _window_of(mask: Tensor, place: str) -> int:
    """The window of a mask [..., tokens, tokens], 0 when it hides only later tokens."""
    tokens = mask.shape[-1]
    flat = mask.expand(*mask.shape[:-2], tokens, tokens).reshape(-1, tokens, tokens)
    if mask.dtype == torch.bool:
        seen = flat
    else:
        seen = flat == 0
        if not bool((seen | (flat <= _HIDDEN)).all()):
            raise UnsupportedModelError(
                "the attention mask adds other values than 0 and -inf",
                where=place,
                hint="biases by distance (ALiBi and the like) are not known",
            )
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if bool((seen & ~causal).any()):
        raise UnsupportedModelError(
            "the attention mask shows later tokens", where=place, hint="a decoder's is causal"
        )
    window = int(seen[0, -1].sum())
    if not torch.equal(seen, causal.triu(1 - window).expand_as(seen)):
        raise UnsupportedModelError(
            "the attention mask is neither causal nor a window of the last tokens", where=place
        )
    return 0 if window == tokens else window


def _ungrouped(graph: fx.Graph, q: Node, k: Node, v: Node) -> tuple[Node, Node]:
    """Keys and values before they were repeated for groups of heads, when both were alike."""
    found = [_before_repeat(graph, item) for item in (k, v)]
    heads = {item.meta["val"].shape[1] for item in found}
    if len(heads) == 1 and q.meta["val"].shape[1] % heads.pop() == 0:
        return found[0], found[1]
    return k, v


def _before_repeat(graph: fx.Graph, node: Node) -> Node:
    """The source of repeat_interleave over heads, or of unsqueeze, expand and reshape."""
    node = _source(node)
    if _is(node, "aten.transpose") and set(node.args[1:]) == {1, 2}:
        inner = _source(node.args[0])
        if (source := _interleaved(inner, 2)) is not None:
            return _call(graph, aten.transpose.int, (source, 1, 2), node)
        return node
    if (source := _interleaved(node, 1)) is not None:
        return _source(source)
    if _is(node, "aten.view", "aten.reshape", "aten._unsafe_view"):
        wide = _source(node.args[0])
        narrow = _source(wide.args[0]) if _is(wide, "aten.expand") else None
        if narrow is not None and _is(narrow, "aten.unsqueeze") and narrow.args[1] in (2, -3):
            source, shape = _source(narrow.args[0]), wide.meta["val"].shape
            if len(shape) == 5 and node.meta["val"].shape[1] == shape[1] * shape[2]:
                return source
    return node


def _interleaved(node: Node, dim: int) -> Node | None:
    """What repeat_interleave repeats along `dim` of four."""
    if not _is(node, "aten.repeat_interleave.self_int"):
        return None
    over = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    return node.args[0] if over is not None and over % 4 == dim else None


def _source(node: Node) -> Node:
    """What a node copies, or takes whole."""
    while _is(node, *_CASTS) or (_is(node, "aten.slice") and _same_shape(node, node.args[0])):
        node = node.args[0]
    return node


def _same_shape(one: Node, two: Node) -> bool:
    return [str(s) for s in one.meta["val"].shape] == [str(s) for s in two.meta["val"].shape]


def _is(node: Node, *names: str) -> bool:
    text = str(getattr(node, "target", ""))
    return any(text == name or text.startswith(f"{name}.") for name in names)


def _arguments(node: Node) -> dict[str, Any]:
    schema = node.target._schema.arguments
    values = {a.name: a.default_value for a in schema}
    values |= {a.name: value for a, value in zip(schema, node.args, strict=False)}
    return values | dict(node.kwargs)


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: Node) -> Node:
    """A new call with the place of `like` and its value."""
    node = graph.call_function(target, args)
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    with like.meta["val"].fake_mode, torch.no_grad():
        node.meta["val"] = target(*map_arg(args, lambda n: n.meta["val"]))
    return node
