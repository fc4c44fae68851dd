"""Attention of an imported graph: what it is spelled as becomes one sitsc::attention a layer.

From scaled_dot_product_attention, or from softmax between two products: scale, softcap, repeated
heads and mask are read off the graph. A mask is computed and compared: only causal ones, with or
without a window, are taken; anything else is refused.
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from sitsc.core.errors import UnsupportedModelError
from sitsc.frontend.onnx_values import TokenValues, numbers

aten: Any = torch.ops.aten
# A mask is looked at for few tokens and for more: whole numbers in it may be its window, but one
# can also be made of fractions.
_FEW_TOKENS, _SEVERAL_TOKENS, _MOST_TOKENS = 24, 1032, 4104
_LOW = -1e4
_SCORES = (
    "matmul",
    "bmm",
    "where",
    "add",
    "mul",
    "div",
    "tanh",
    "_to_copy",
    "to",
    "expand",
    "clone",
)
Node = Any


@dataclass(slots=True)
class _Scores:
    """What lies between the product of q and k and the softmax; `masks` with what keeps a key.

    `sinks` [heads] are scores that take part in the softmax and belong to no key.
    """

    q: Node
    k: Node
    scale: float = 1.0
    softcap: float = 0.0
    masks: list[tuple[Node, str]] = field(default_factory=list)
    sinks: Node = None


def is_call(node: Node, *names: str) -> bool:
    """Whether a node calls one of aten's operators, any overload."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name.split("::")[-1] in names


def replace_attention(graph: fx.Graph, values: TokenValues) -> int:
    """Rewrite every attention; how many there were. Raises UnsupportedModelError."""
    count = 0
    for node in list(graph.nodes):
        if is_call(node, "scaled_dot_product_attention"):
            _from_sdpa(graph, node, values, count)
        elif is_call(node, "softmax", "_softmax"):
            _from_softmax(graph, node, values, count)
        else:
            continue
        count += 1
        graph.eliminate_dead_code()
    return count


def _from_sdpa(graph: fx.Graph, node: Node, values: TokenValues, layer: int) -> None:
    schema = node.target._schema.arguments
    given = {a.name: v for a, v in zip(schema, node.args, strict=False)} | dict(node.kwargs)
    mask = given.get("attn_mask")
    q, k = given["query"], given["key"]
    scale = given.get("scale")
    scores = _Scores(q, k, _head_dim(q) ** -0.5 if scale is None else float(scale))
    if mask is not None:
        kind = "true" if mask.meta["val"].dtype == torch.bool else "add"
        scores.masks.append((mask, kind))
    window = 0 if given.get("is_causal") else _window(scores.masks, values)
    _insert(graph, node, scores, given["value"], layer, window)


def _from_softmax(graph: fx.Graph, node: Node, values: TokenValues, layer: int) -> None:
    if node.args[1] not in (-1, node.meta["val"].dim() - 1):
        raise _unknown(f"softmax goes over dimension {node.args[1]}, not over the keys")
    whole, sinks = _without_sinks(node.args[0])
    product, v = _product_after(_without_last(node) if sinks is not None else node)
    scores = _scores_before(whole)
    scores.sinks = sinks
    _insert(graph, product, scores, v, layer, _window(scores.masks, values))


def _product_after(softmax: Node) -> tuple[Node, Node]:
    """The product of the weights with the values, and the values."""
    node = softmax
    while True:
        users = list(node.users)
        others = [u for u in users if not is_call(u, "isnan")]
        if len(others) != 1:
            raise _unknown(f"the weights of attention are read by {[u.name for u in users]}")
        (user,) = others
        if is_call(user, "matmul", "bmm") and user.args[0] is node:
            return user, user.args[1]
        passes = is_call(user, "_to_copy", "to", "dropout", "expand", "clone", "contiguous")
        passes |= is_call(user, "where") and user.args[2] is node and is_call(user.args[0], "isnan")
        if not passes:
            raise _unknown(f"softmax is followed by {user.target}")
        node = user


def _without_sinks(node: Node) -> tuple[Node, Node]:
    """Scores without a column of sinks at their end, and the sinks [heads]; None without any.

    What is subtracted from all scores, their largest, changes nothing.
    """
    if is_call(node, "sub") and _is_largest_of(node.args[1], node.args[0]):
        node = node.args[0]
    if not is_call(node, "cat") or len(node.args[0]) != 2:
        return node, None
    scores, column = node.args[0]
    sinks, sizes = column, column.meta["val"].shape
    while is_call(sinks, "expand", "_to_copy", "to"):
        sinks = sinks.args[0]
    heads = sinks.meta["val"].shape
    while is_call(sinks, "reshape", "view", "unsqueeze", "_to_copy", "to"):
        sinks = sinks.args[0]
    alone = sinks.op == "placeholder" and tuple(sinks.meta["val"].shape) == tuple(heads[-3:-2])
    last = len(node.args) > 1 and node.args[1] in (-1, 3) and str(sizes[-1]) == "1"
    if not (last and alone and len(heads) == 4 and tuple(heads[-2:]) == (1, 1)):
        raise _unknown("scores are joined with something")
    return scores, sinks


def _is_largest_of(value: Node, node: Node) -> bool:
    """Whether a value is the maximum along the last dimension of another."""
    if getattr(value, "target", None) is operator.getitem and value.args[1] == 0:
        value = value.args[0]
    return is_call(value, "amax", "max") and value.args[0] is node


def _without_last(softmax: Node) -> Node:
    """The weights of attention without the column of the sinks."""
    users = list(softmax.users)
    if len(users) == 1 and is_call(users[0], "slice") and len(users[0].args) == 4:
        _, axis, start, end = users[0].args
        if (axis % 4, start, end) == (3, 0, -1):
            return users[0]
    raise _unknown("the column of the sinks is not left out")


def _scores_before(node: Node) -> _Scores:
    """Walk from the scores back to the product of q and k."""
    scale, cap = 1.0, 0.0
    masks: list[tuple[Node, str]] = []
    while not is_call(node, "matmul", "bmm"):
        args: Any = getattr(node, "args", ())
        if is_call(node, "_to_copy", "to", "expand", "clone", "contiguous"):
            node = args[0]
        elif is_call(node, "mul", "div") and isinstance(args[1], int | float):
            scale *= args[1] if is_call(node, "mul") else 1 / args[1]
            node = args[0]
        elif is_call(node, "tanh") and is_call(args[0], "div", "mul"):
            node, by = args[0], float(args[0].args[1])
            if abs((scale / by if is_call(node, "div") else scale * by) - 1) > 1e-6:
                raise _unknown("scores are capped in a way that is not known")
            cap, scale, node = abs(scale), 1.0, node.args[0]
        elif is_call(node, "add") and len(args) == 2 and isinstance(args[1], fx.Node):
            _refuse_scaled(scale)
            first = _leads_to_product(args[0])
            masks.append((args[1] if first else args[0], "add"))
            node = args[0] if first else args[1]
        elif is_call(node, "where"):
            _refuse_scaled(scale)
            keeps = _leads_to_product(args[1])
            _check_low(args[2] if keeps else args[1])
            masks.append((args[0], "true" if keeps else "false"))
            node = args[1] if keeps else args[2]
        else:
            raise _unknown(f"scores come from {getattr(node, 'target', node)}")
    turned, k_scale = _scaled(node.args[1])
    (q, q_scale), (k, inner) = _scaled(node.args[0]), _scaled(_transposed(turned))
    return _Scores(q, k, scale * k_scale * q_scale * inner, cap, masks)


def _refuse_scaled(scale: float) -> None:
    if scale != 1.0:
        raise _unknown("the mask is scaled")


def _leads_to_product(node: Node) -> bool:
    """Whether a value is scores: scaled, capped or masked products."""
    while is_call(node, *_SCORES):
        if is_call(node, "matmul", "bmm"):
            return True
        if is_call(node, "where"):
            return _leads_to_product(node.args[1]) or _leads_to_product(node.args[2])
        if is_call(node, "add"):
            return _leads_to_product(node.args[0]) or _leads_to_product(node.args[1])
        node = node.args[0]
    return False


def _check_low(value: Node) -> None:
    """What stands for a hidden key must be a large negative number."""
    while isinstance(value, fx.Node) and is_call(value, "full", "full_like", "expand", "_to_copy"):
        value = value.args[1] if is_call(value, "full", "full_like") else value.args[0]
    if not isinstance(value, int | float) or value > _LOW:
        raise _unknown("hidden keys do not get a large negative score")


def _scaled(node: Node) -> tuple[Node, float]:
    """A value without factors, and their product."""
    factor = 1.0
    while is_call(node, "mul", "div") and isinstance(node.args[1], int | float):
        factor *= node.args[1] if is_call(node, "mul") else 1 / node.args[1]
        node = node.args[0]
    return node, factor


def _transposed(node: Node) -> Node:
    """The keys [1, heads, tokens, dim] of which a value is the transposed, in 4 or 3 dimensions."""
    if _swaps_last(node, 4):
        return node.args[0]
    if is_call(node, "permute") and list(node.args[1]) == [0, 2, 3, 1]:
        return swapped(node.graph, node.args[0], node)
    if is_call(node, "reshape", "view") and _swaps_last(node.args[0], 3):
        inner = node.args[0].args[0]
        if is_call(inner, "reshape", "view"):
            keys, sizes = inner.args[0], _sizes(node)
            flat, source = _sizes(inner), _sizes(keys)
            same = sizes == [*source[:2], *source[:1:-1]] and flat[1:] == source[2:]
            if same and len(source) == 4 and source[0] == "1":
                return keys
    raise _unknown("keys are not transposed")


def swapped(graph: fx.Graph, source: Node, before: Node) -> Node:
    """`source` with its second and third dimension exchanged, made before another node."""
    with graph.inserting_before(before):
        new = graph.call_function(aten.transpose.int, (source, 1, 2))
    with source.meta["val"].fake_mode:
        new.meta["val"] = source.meta["val"].transpose(1, 2)
    return new


def _swaps_last(node: Node, rank: int) -> bool:
    """Whether a call swaps the last two of `rank` dimensions."""
    if is_call(node, "transpose") and node.meta["val"].dim() == rank:
        return {axis % rank for axis in node.args[1:3]} == {rank - 2, rank - 1}
    order = [*range(rank - 2), rank - 1, rank - 2]
    return is_call(node, "permute") and list(node.args[1]) == order


def _sizes(node: Node) -> list[str]:
    return [str(size) for size in node.meta["val"].shape]


def _head_dim(node: Node) -> int:
    return int(node.meta["val"].shape[-1])


def unrepeated(node: Node) -> Node:
    """[1, kv_heads, tokens, dim] behind keys or values that are repeated for groups of heads."""
    wide: Any = node.args[0] if is_call(node, "reshape", "view", "_unsafe_view", "clone") else None
    while is_call(wide, "clone", "contiguous"):
        wide = wide.args[0]
    if not is_call(wide, "expand") or wide.meta["val"].dim() != 5:
        return node
    inner = wide.args[0]
    while is_call(inner, "expand"):
        inner = inner.args[0]
    if not is_call(inner, "unsqueeze") or inner.args[1] % 5 != 2:
        return node
    return inner.args[0]


def _window(masks: list[tuple[Node, str]], values: TokenValues) -> int:
    """The window of causal masks, 0 without one. Raises UnsupportedModelError for other masks."""
    if not masks:
        raise _unknown("attention sees later tokens: it has no mask")
    if any(mask not in values.known for mask, _ in masks):
        raise _unknown("the mask depends on the values of tokens")
    found = {n for mask, _ in masks for n in numbers(mask) if 1 < n < 2**31 - 1}
    if any(_MOST_TOKENS - 8 < n <= 1 << 20 for n in found):
        raise _unknown(
            f"the mask is made with the number {max(found)}: a window so long is unknown"
        )
    most = max(_SEVERAL_TOKENS, min(_MOST_TOKENS, max(found, default=0) + 8))
    window, few = (_window_at(masks, values, tokens) for tokens in (most, _FEW_TOKENS))
    if few != min(window or most, _FEW_TOKENS) % _FEW_TOKENS:
        raise _unknown("the mask depends on the number of tokens")
    return window


def _window_at(masks: list[tuple[Node, str]], values: TokenValues, tokens: int) -> int:
    """The window of `tokens` tokens, 0 when each sees all before. Raises UnsupportedModelError."""
    visible = torch.ones(tokens, tokens, dtype=torch.bool)
    for mask, kind in masks:
        visible &= _visible(values.compute(mask, tokens), kind, tokens)
    row, low = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    window = int(visible[-1].sum())
    if torch.equal(visible, (low <= row) & (low > row - window)) and window:
        return 0 if window == tokens else window
    raise _unknown("attention is not causal")


def _visible(mask: Tensor, kind: str, tokens: int) -> Tensor:
    """[tokens, tokens], true where a key is seen; every head must see the same."""
    if kind == "add":
        kept = mask == 0
        if not bool((kept | (mask <= _LOW)).all()):
            raise _unknown("scores get a bias that is no mask")
    else:
        kept = mask if kind == "true" else ~mask
    flat = kept.expand(*kept.shape[:-2], tokens, tokens).reshape(-1, tokens, tokens)
    if not bool((flat == flat[:1]).all()):
        raise _unknown("heads have different masks")
    return flat[0]


def _unknown(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        what, hint="only causal attention, with a window or without, is imported"
    )


def _insert(graph: fx.Graph, node: Node, scores: _Scores, v: Node, layer: int, window: int) -> None:
    """One sitsc::attention in place of `node` [1, heads, tokens, dim]."""
    k, v = unrepeated(scores.k), unrepeated(v)
    q = scores.q
    sizes = [tuple(n.meta["val"].shape) for n in (q, k, v)]
    fits = all(len(s) == 4 for s in sizes) and sizes[1][1] == sizes[2][1]
    if not fits or int(sizes[0][1]) % int(sizes[1][1]):
        raise _unknown("attention has heads that do not fit")
    with graph.inserting_before(node):
        new = graph.call_function(
            torch.ops.sitsc.attention.default,
            (q, k, v, scores.sinks, layer, float(scores.scale), window, float(scores.softcap)),
        )
    with node.meta["val"].fake_mode:
        new.meta["val"] = torch.ops.sitsc.attention.default(*(_fake(a) for a in new.args))
    node.replace_all_uses_with(swapped(graph, new, node))
    graph.erase_node(node)  # torch keeps an attention that nothing reads


def _fake(value: Any) -> Any:
    return value.meta["val"] if isinstance(value, fx.Node) else value
