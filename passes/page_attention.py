"""Page attention: attention over one sequence becomes attention over pages of a ragged batch.

Rotary embedding of q and k is folded in, the KV write with it. Adds the step inputs block_table,
query_start, context_lens and one KV pool a group of layers that share a layout. The sizes of these
inputs here are only examples: `meta["dims"]` names what moves.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch._guards import detect_fake_mode

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.weights import DTYPES
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import (
    Node,
    add_input,
    arguments,
    aten,
    call,
    calls,
    is_op,
    module_path,
    ops,
    replace,
    tensor,
)

_HINT_PAGES = 11
_BATCH_INPUTS: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "block_table": (("sequences", "sequence_pages"), (3, 5)),
    "query_start": (("sequences+1",), (4,)),
    "context_lens": (("sequences",), (3,)),
}


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What must agree for layers to share a pool: (kv_heads, head_dim)."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class PageAttention:
    """See the module; raises UnsupportedModelError for what a page cannot hold."""

    name: ClassVar[str] = "page_attention"
    preserves_numerics: ClassVar[bool] = True

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place."""
        found = calls(graph, "attention")
        if not found:
            return
        groups: dict[KvLayout, list[Node]] = {}
        for node in found:
            groups.setdefault(_layout(node, context), []).append(node)
        inputs = _batch_inputs(graph, found[0])
        for index, (layout, nodes) in enumerate(groups.items()):
            pool = _pool(graph, index, layout, len(nodes), context)
            for place, node in enumerate(nodes):
                _lower(graph, node, (pool, *inputs, place, context.page_tokens))


def _layout(node: Node, context: PassContext) -> KvLayout:
    keys, values = (tensor(arguments(node)[key]) for key in ("k", "v"))
    narrower = values.shape[3] < keys.shape[3] and context.target == "cpu"
    if keys.shape[3] != values.shape[3] and not narrower:
        raise UnsupportedModelError(
            f"keys of {keys.shape[3]} and values of {values.shape[3]} elements a head",
            where=module_path(node),
            hint="both alike, or values narrower than keys with --target cpu",
        )
    return KvLayout(int(keys.shape[1]), int(keys.shape[3]))


def _batch_inputs(graph: fx.Graph, like: Node) -> tuple[Node, ...]:
    mode = detect_fake_mode([tensor(like)])
    assert mode is not None
    device = tensor(like).device
    nodes = []
    for name, (dims, hints) in _BATCH_INPUTS.items():
        with mode:
            value = torch.empty(hints, dtype=torch.int32, device=device)
        nodes.append(add_input(graph, name, value, dims))
    return tuple(nodes)


def _pool(graph: fx.Graph, index: int, layout: KvLayout, layers: int, context: PassContext) -> Node:
    like = tensor(next(n for n in graph.nodes if n.op == "placeholder" and "input" in n.meta))
    mode = detect_fake_mode([like])
    assert mode is not None
    fixed = (2, layout.kv_heads, layout.head_dim * context.page_tokens)
    with mode:
        value = torch.empty(
            (_HINT_PAGES, layers, *fixed), dtype=DTYPES[context.kv_dtype], device=like.device
        )
    return add_input(graph, f"kv_{index}", value, ("pages", layers, *fixed))


def _rows(graph: fx.Graph, node: Node) -> Node:
    """[1, heads, tokens, dim] as [tokens, heads, dim], undoing a transpose where there is one."""
    if is_op(node, "transpose") and set(node.args[1:]) == {1, 2}:
        return call(graph, aten.select.int, (node.args[0], 0, 0), node)
    flat = call(graph, aten.select.int, (node, 0, 0), node)
    return call(graph, aten.transpose.int, (flat, 0, 1), node)


def _rotation(q: Node, k: Node) -> tuple[Node, Node, Node, Node, str]:
    """(q, k, cos, sin, style) before rotary embedding when both have the same, else as they are."""
    if is_op(q, "rope") and is_op(k, "rope"):
        (q_x, *of_q), (k_x, *of_k) = arguments(q).values(), arguments(k).values()
        if of_q == of_k:
            return q_x, k_x, *of_q
    return q, k, None, None, "none"


def _lower(graph: fx.Graph, node: Node, batch: tuple[Any, ...]) -> None:
    old = arguments(node)
    q, k, cos, sin, style = _rotation(old["q"], old["k"])
    with graph.inserting_before(node):
        q, k, v = (_rows(graph, item) for item in (q, k, old["v"]))
        sinks = _float32(graph, old["sinks"])
        args = (q, k, v, cos, sin, sinks, *batch, old["scale"], old["window"], old["softcap"])
        new = call(graph, ops.paged_attention.default, (*args, style), node)
        new.meta["layer"] = old["layer"]
        shape = [1, -1, *tensor(node).shape[2:]]
        replace(node, call(graph, aten.reshape.default, (new, shape), node))


def _float32(graph: fx.Graph, sinks: Node) -> Node:
    """Sinks in float32, as kernels read them."""
    if sinks is None or tensor(sinks).dtype == torch.float32:
        return sinks
    return call(graph, aten._to_copy.default, (sinks,), sinks, dtype=torch.float32)
