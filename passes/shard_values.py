"""The values of a graph while it is sharded: what stands for each on a rank, and its layout.

Rules ask for a value as it lies (`local`), whole (`whole`) or cut in a given way (`cut`), and emit
calls of their own. Collectives, cut weights and the input "tp_rank" are made here.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_aggregate

from sitsc.core.cut_weights import cut_weight, zero_weight
from sitsc.core.ops.collectives import TP
from sitsc.core.parallel import Partition
from sitsc.core.printer import target_name
from sitsc.core.ranges import Ranges, elements
from sitsc.core.weights import WeightSpec, constant_spec
from sitsc.passes.fxutil import (
    Node,
    add_input,
    add_weight,
    aten,
    call,
    is_op,
    ops,
    spec_of,
    tensor,
    weight_of,
)
from sitsc.passes.shard_layout import Layout, Partial, Sharded
from sitsc.passes.shard_names import sizes_of
from sitsc.passes.shard_table import ShardTable, keep_table

NOTE = "made_whole_for"
RANK = "tp_rank"
_KEPT_META = ("layer",)


class Values:
    """See the module; `at` is the call that is being sharded."""

    def __init__(self, graph: fx.Graph, partition: Partition) -> None:
        self.graph, self.partition = graph, partition
        self.tp = partition.tp
        self._env: dict[fx.Node, Any] = {}
        self._layouts: dict[fx.Node, Any] = {}
        self._cuts: dict[Any, fx.Node] = {}
        self._ranks: dict[fx.Node, tuple[WeightSpec, ...]] = {}
        self._rank: Node = None
        self._old = [node for node in graph.nodes if node.op == "call_function"]
        self.at: Node = None

    # --- reading ---------------------------------------------------------------------------------

    def layout(self, node: Node) -> Any:
        """The layout of a value of the whole graph (a list of them for a split)."""
        return self._layouts.get(node)

    def local(self, node: Node) -> Node:
        """What stands for a value on this rank, in its layout."""
        return self._env.get(node, node)

    def whole(self, node: Node, note: str = "") -> Node:
        """The value on every rank; `note` says which operator asked without knowing parts."""
        layout = self.layout(node)
        if isinstance(layout, Partial):
            made = self.emit(ops.all_reduce.default, (self.local(node), None, TP))
            for other in layout.rest:
                made = self.emit(aten.add.Tensor, (other, made))
        elif isinstance(layout, Sharded):
            made = self._gather(node, layout, note)
        else:
            return self.local(node)
        self._env[node] = made
        self._layouts[node] = None
        return made

    def cut(self, node: Node, layout: Sharded) -> Node:
        """The value as `layout` has it: a cut of a weight where it is one, else taken by rank."""
        if self.layout(node) == layout:
            return self.local(node)
        source = self.whole(node)
        if is_parameter(node):
            return self.weight(node, layout.dim, layout.held)
        if is_op(node, "_to_copy", "to") and is_parameter(node.args[0]):
            inside = self.weight(node.args[0], layout.dim, layout.held)
            return self.emit(node.target, (inside, *node.args[1:]), **node.kwargs)
        if is_op(node, "expand") and _size(node.args[0], layout.dim, tensor(node).dim()) == 1:
            shape = list(self.mapped(node.args[1]))
            shape[layout.dim] = layout.local
            return self.emit(node.target, (self.whole(node.args[0]), shape))
        return self._taken(source, layout)

    def mapped(self, value: Any) -> Any:
        """Arguments with every value as it lies."""
        return map_aggregate(
            value, lambda item: self.local(item) if isinstance(item, fx.Node) else item
        )

    # --- making ----------------------------------------------------------------------------------

    def emit(self, target: Any, args: tuple[Any, ...], **kwargs: Any) -> Node:
        """A new call before the one that is being sharded."""
        with self.graph.inserting_before(self.at):
            node = call(self.graph, target, args, self.at, **kwargs)
        node.meta |= {key: self.at.meta[key] for key in _KEPT_META if key in self.at.meta}
        return node

    def weight(self, node: Node, dim: int, held: tuple[Ranges, ...]) -> Node:
        """The ranks' parts of a weight, which may be cut along another dimension already."""
        ranks = self._ranks.get(node, (spec_of(node),) * self.tp)
        parts = (cut_weight(spec, dim, ranges) for spec, ranges in zip(ranks, held, strict=True))
        return self._part((node, dim, held), node, parts)

    def once(self, node: Node, ranks: tuple[int, ...] = (0,)) -> Node:
        """A bias that only `ranks` have and zeros elsewhere, so that a sum adds it once."""
        specs = self._ranks.get(node, (spec_of(node),) * self.tp)
        parts = (s if rank in ranks else zero_weight(s) for rank, s in enumerate(specs))
        return self._part((node, ranks), node, parts)

    def _part(self, key: Any, like: Node, parts: Iterable[WeightSpec]) -> Node:
        if key not in self._cuts:
            ranks = tuple(parts)
            self._cuts[key] = add_weight(self.graph, ranks[0], like)
            self._ranks[self._cuts[key]] = ranks
        return self._cuts[key]

    def rank(self) -> Node:
        """The input "tp_rank", int64 [1]: the number of this rank in its stage."""
        if self._rank is None:
            inputs = [n for n in self.graph.nodes if n.op == "placeholder" and "input" in n.meta]
            mode = detect_fake_mode([tensor(inputs[0])])
            assert mode is not None
            with mode:
                value = torch.empty((1,), dtype=torch.int64, device=tensor(inputs[0]).device)
            self._rank = add_input(self.graph, RANK, value, (1,))
        return self._rank

    def resize(self, node: Node, dim: int, size: int) -> None:
        """A step input of which each rank has its own: dimension `dim` has `size` elements."""
        shape, dims = list(tensor(node).shape), list(node.meta["dims"])
        shape[dim] = dims[dim] = size
        mode = detect_fake_mode([tensor(node)])
        assert mode is not None
        with mode:
            value = torch.empty(shape, dtype=tensor(node).dtype, device=tensor(node).device)
        node.meta |= {"dims": tuple(dims), "val": value}

    # --- the walk --------------------------------------------------------------------------------

    def begin(self, node: Node) -> None:
        """Calls are emitted before `node` from now on."""
        self.at = node

    def settle(self, node: Node, layout: Any) -> None:
        """The layout of what a rule has `put`."""
        self._layouts[node] = layout

    def put(self, node: Node, made: Any) -> None:
        """What stands for `node` on this rank."""
        self._env[node] = made

    def plain(self, node: Node) -> Layout:
        """The call as it is, over whole values."""
        cut = [a for a in node.all_input_nodes if self.layout(a) is not None]
        for value in cut:
            self.whole(value, target_name(node))
        node.args, node.kwargs = self.mapped(node.args), self.mapped(node.kwargs)
        return None

    def finish(self, output: Node) -> None:
        """Results are whole."""
        self.at = output
        output.args = map_aggregate(
            output.args, lambda n: self.whole(n) if isinstance(n, fx.Node) else n
        )

    def remove_old(self) -> None:
        """Remove what the calls of the whole graph were; name every weight apart."""
        for node in reversed(self._old):
            if not node.users:
                self.graph.erase_node(node)
        for node in list(self.graph.nodes):
            if node.op == "placeholder" and not node.users and "weight" in node.meta:
                self.graph.erase_node(node)
        self._name_apart()
        used = [self._ranks[n] for n in self.graph.nodes if n in self._ranks]
        keep_table(self.graph, ShardTable.of(self.tp, used))

    def _name_apart(self) -> None:
        known: dict[str, int] = {}
        for node in self.graph.nodes:
            spec = weight_of(node)
            if spec is not None:
                count = known[spec.name] = known.get(spec.name, 0) + 1
                if count > 1:
                    node.meta["weight"] = replace(spec, name=f"{spec.name}#{count}")

    def _note(self, node: fx.Node, note: str) -> None:
        if note:
            node.meta[NOTE] = note

    def _gather(self, node: Node, layout: Sharded, note: str) -> Node:
        made = self.emit(ops.all_gather.default, (self.local(node), layout.dim, self.tp, TP))
        self._note(made, note)
        size = sizes_of(node)[layout.dim]
        if layout.contiguous(size):
            if sizes_of(made)[layout.dim] == size:
                return made
            return self.emit(aten.slice.Tensor, (made, layout.dim, 0, size))
        flat = [element for held in layout.held for element in elements(held)]
        places = {element: place for place, element in reversed(list(enumerate(flat)))}
        order = torch.tensor([places[element] for element in range(size)])
        return self.emit(aten.index_select.default, (made, layout.dim, self._constant(order)))

    def _taken(self, source: Node, layout: Sharded) -> Node:
        """Elements of a value that every rank has, by a table of all ranks."""
        table = torch.tensor([elements(held) for held in layout.held])
        row = self.emit(aten.index_select.default, (self._constant(table), 0, self.rank()))
        chosen = self.emit(aten.reshape.default, (row, [-1]))
        return self.emit(aten.index_select.default, (source, layout.dim, chosen))

    def _constant(self, value: torch.Tensor) -> Node:
        spec = constant_spec("", value)
        key = ("constant", spec)
        if key not in self._cuts:
            name = f"shard.table_{sum('constant' in k for k in self._cuts)}"
            like = next(n for n in self.graph.nodes if n.op == "placeholder")
            self._cuts[key] = add_weight(self.graph, replace(spec, name=name), like)
        return self._cuts[key]


def is_parameter(node: Node) -> bool:
    """A weight of the checkpoint: constants may be written into code, which all ranks share."""
    spec = weight_of(node)
    return spec is not None and spec.role == "weight"


def _size(node: Node, dim: int, dims: int) -> int:
    """The size of a value along a dimension of what it is broadcast to."""
    sizes = sizes_of(node)
    place = dim - (dims - len(sizes))
    return sizes[place] if place >= 0 else 1
