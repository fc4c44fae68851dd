"""Which linear layers are cut by columns, and which columns each rank computes.

Begins where a cut is natural: the heads of attention, what comes between two linear layers, the
logits. Walks back from there to the layers behind, with the number of the column that each element
came from. Only a choice: whatever is chosen here, `Shard` keeps the results right.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from sitsc.core.ranges import Ranges, elements, ranges_of
from sitsc.passes.fxutil import Node, arguments, calls, is_op, weight_of
from sitsc.passes.shard_layout import even, kv_heads, vocabulary
from sitsc.passes.shard_names import COMPLEX, ELEMENTWISE, LINEAR, VIEWS, sizes_of

_ROW_WISE = ("rms_norm", "layer_norm", "native_layer_norm", "rope")
_UNKNOWN = -1
_APART = 1 << 32


def is_linear(node: Node) -> bool:
    """A linear layer over a weight of the checkpoint."""
    if not is_op(node, *LINEAR):
        return False
    spec = weight_of(linear_weight(node))
    return spec is not None and spec.role == "weight"


def linear_weight(node: Node) -> Node:
    """The weight of aten.linear [out, in] or aten.addmm [in, out]."""
    return node.args[2] if is_op(node, "addmm") else node.args[1]


def linear_input(node: Node) -> Node:
    """What a linear layer reads."""
    return node.args[1] if is_op(node, "addmm") else node.args[0]


@dataclass(slots=True)
class Demands:
    """Columns of linear layers by rank; made by `column_demands`."""

    parts: int
    columns: dict[fx.Node, tuple[Ranges, ...]] = field(default_factory=dict)
    _sources: list[fx.Node] = field(default_factory=list)
    _known: dict[tuple[fx.Node, bool], list[Tensor]] = field(default_factory=dict)

    def labels(self, node: Node, norms: bool) -> list[Tensor]:
        """For each operand that makes an element: source · 2³² + column, or -1 for none known.

        Shaped like the value with 1 for each free size. `norms`: whether to look through them.
        """
        key = (node, norms)
        if key not in self._known:
            try:
                self._known[key] = self._labels(node, norms)
            except (RuntimeError, IndexError, TypeError):  # a view that mixes free sizes in
                self._known[key] = [_unknown(node)]
        return self._known[key]

    def _labels(self, node: Node, norms: bool) -> list[Tensor]:
        if is_linear(node) or is_op(node, "paged_attention"):
            self._sources.append(node)
            first = (len(self._sources) - 1) * _APART
            return [torch.arange(first, first + sizes_of(node)[-1]).expand(sizes_of(node))]
        if is_op(node, "cat"):
            every = [self.labels(item, norms) for item in node.args[0]]
            most = max(map(len, every))
            rows = [[some[i % len(some)] for some in every] for i in range(most)]
            return [torch.cat(row, arguments(node)["dim"]) for row in rows]
        if is_op(node, *VIEWS, *COMPLEX) or _is_getitem(node):
            return self._view(node, norms)
        if is_op(node, "glu", *ELEMENTWISE) or (norms and is_op(node, *_ROW_WISE)):
            return self._elementwise(node, norms)
        return [_unknown(node)]

    def _view(self, node: Node, norms: bool) -> list[Tensor]:
        if _is_getitem(node):
            parts, index = node.args
            if not is_op(parts, "split", "split_with_sizes", "chunk"):
                return [_unknown(node)]
            args = _plain(parts.args[1:])
            source = self.labels(parts.args[0], norms)
            return [parts.target(item, *args, **_plain(parts.kwargs))[index] for item in source]
        found = self.labels(node.args[0], norms)
        if is_op(node, "reshape", "view", "expand"):
            shape = sizes_of(node)
            one = is_op(node, "expand")
            return [item.expand(shape) if one else item.reshape(shape) for item in found]
        if is_op(node, "view_as_complex"):
            return [item[..., part] for item in found for part in (0, 1)]
        if is_op(node, "view_as_real"):
            return [item[..., None].expand(sizes_of(node)) for item in found]
        if is_op(node, "index"):
            return [item if item.shape == sizes_of(node) else _unknown(node) for item in found]
        made = [node.target(item, *_plain(node.args[1:]), **_plain(node.kwargs)) for item in found]
        return made if made[0].shape == torch.Size(sizes_of(node)) else [_unknown(node)]

    def _elementwise(self, node: Node, norms: bool) -> list[Tensor]:
        """Labels of all operands; what has no width of its own, weights and numbers have none."""
        shape, found = sizes_of(node), []
        values = [a for a in node.args if isinstance(a, fx.Node)]
        inputs = values[:1] if is_op(node, *_ROW_WISE) else values
        inputs = [a for a in inputs if not _is_weight(a)]
        if is_op(node, "add", "sub") and len(inputs) > 1 and not norms:
            return [_unknown(node)]  # a residual: what is behind it is no matter of this layer
        for value in inputs:
            some = [item.expand(shape) for item in self.labels(value, norms)]
            narrow = sizes_of(value)[-1:] in ((), (1,)) and len(inputs) > 1
            if not (narrow and all(bool((item < 0).all()) for item in some)):
                found += some
        return found or [_unknown(node)]

    def of_source(self, label: int) -> tuple[fx.Node, int]:
        """The node and column behind a label."""
        return self._sources[label // _APART], label % _APART

    def take(self, wanted: dict[fx.Node, list[set[int]]]) -> None:
        """Keep wanted columns of each source where all ranks then compute equally many of all."""
        for node, ranks in wanted.items():
            whole = set(range(sizes_of(node)[-1]))
            sizes = {len(columns) for columns in ranks}
            if set().union(*ranks) != whole or len(sizes) != 1 or sizes == {len(whole)}:
                continue
            self.columns.setdefault(node, tuple(ranges_of(sorted(c)) for c in ranks))

    def columns_of(self, labels: Iterable[Tensor], wanted: dict[fx.Node, list[set[int]]]) -> None:
        """Add what each rank's `labels` name to `wanted`."""
        for rank, some in enumerate(labels):
            for label in some.reshape(-1).unique().tolist():
                if label >= 0:
                    node, column = self.of_source(label)
                    if is_linear(node):
                        empty: list[set[int]] = [set() for _ in range(self.parts)]
                        wanted.setdefault(node, empty)[rank].add(column)


def column_demands(graph: fx.Graph, parts: int) -> dict[fx.Node, tuple[Ranges, ...]]:
    """Linear layers whose columns are cut among `parts` ranks, with the columns of each."""
    found = Demands(parts)
    _heads(graph, found)
    _between(graph, found)
    _logits(graph, found)
    return found.columns


def _heads(graph: fx.Graph, found: Demands) -> None:
    """Columns behind the heads of each rank, over all attention calls."""
    wanted: dict[fx.Node, list[set[int]]] = {}
    for node in calls(graph, "paged_attention"):
        args = arguments(node)
        for name in ("q", "k", "v"):
            heads = sizes_of(args[name])[1]
            held = even(heads, found.parts) if name == "q" else kv_heads(heads, found.parts)
            for labels in found.labels(args[name], norms=True):
                rows = (labels[:, torch.tensor(elements(ranges))] for ranges in held)
                found.columns_of(rows, wanted)
    found.take(wanted)


def _between(graph: fx.Graph, found: Demands) -> None:
    """What lies between two linear layers: the first is cut by columns, the second by rows."""
    for node in graph.nodes:
        if not is_linear(node) or node in found.columns:
            continue
        flat = _read_columns(node, found)
        held = _owners(flat, found)
        if held is None:
            continue
        wanted: dict[fx.Node, list[set[int]]] = {}
        for item in flat:
            found.columns_of((item[torch.tensor(elements(r))] for r in held), wanted)
        found.take(wanted)


def _read_columns(node: Node, found: Demands) -> list[Tensor]:
    """The labels of what a linear layer reads; none where its input is not known to the last."""
    labels = found.labels(linear_input(node), norms=False)
    flat = [item.reshape(-1) for item in labels if item.numel() == item.shape[-1]]
    known = len(flat) == len(labels) and not any(bool((item < 0).any()) for item in flat)
    return flat if known else []


def inner_sizes(graph: fx.Graph) -> set[int]:
    """How many columns lie between two linear layers: of MLPs, and not those of heads."""
    found, sizes = Demands(1), set()
    for node in graph.nodes:
        flat = _read_columns(node, found) if is_linear(node) else []
        if flat and all(is_linear(found.of_source(int(item[0]))[0]) for item in flat):
            sizes.add(len(flat[0]))
    return sizes


def _owners(flat: list[Tensor], found: Demands) -> tuple[Ranges, ...] | None:
    """Which rank has which elements: that of attention's heads where it made them, else equal."""
    if not flat:
        return None
    size = len(flat[0])
    for item in flat:
        node, column = found.of_source(int(item[0]))
        if is_op(node, "paged_attention"):
            heads = sizes_of(arguments(node)["q"])[1]
            whole = sizes_of(node)[-1]
            in_order = column == 0 and bool((item.diff() == 1).all()) and len(item) == whole
            if not in_order or heads % found.parts:
                return None
    return even(size, found.parts) if size % found.parts == 0 else None


def _logits(graph: fx.Graph, found: Demands) -> None:
    """The head: columns of the vocabulary, padded where it does not divide."""
    results: Any = graph.output_node().args[0]
    for result in results if isinstance(results, tuple) else (results,):
        labels = found.labels(result, norms=False)
        if len(labels) != 1 or bool((labels[0] < 0).any()):
            continue
        flat = labels[0].reshape(-1)
        node, column = found.of_source(int(flat[0]))
        whole = is_linear(node) and len(flat) == sizes_of(node)[-1]
        if whole and column == 0 and bool((flat.diff() == 1).all()) and node not in found.columns:
            found.columns[node] = vocabulary(len(flat), found.parts)


def _unknown(node: Node) -> Tensor:
    return torch.full(sizes_of(node), _UNKNOWN)


def _is_getitem(node: Node) -> bool:
    return isinstance(node, fx.Node) and getattr(node.target, "__name__", "") == "getitem"


def _is_weight(node: Node) -> bool:
    while is_op(node, "_to_copy", "to", "reshape", "unsqueeze"):
        node = node.args[0]
    return weight_of(node) is not None


def _plain(value: Any) -> Any:
    """Arguments with 1 for each free size."""
    return map_aggregate(value, lambda a: 1 if isinstance(a, fx.Node) else a)
