"""Shard: the graph of a whole stage becomes the graph of one of its ranks.

Layouts (replicated, cut along a dimension, sums still to be taken) go through the graph from the
linear layers that `column_demands` chose, and collectives are put where a value is needed whole.
All ranks call the same operators over weights of the same shapes; `shard_table` knows the slices of
each. An operator without a rule reads whole values: `gathers` tells where that costs.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from sitsc.core.parallel import Partition, check_shards
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import calls, module_path, weight_of
from sitsc.passes.shard_demand import column_demands
from sitsc.passes.shard_experts import shard_experts
from sitsc.passes.shard_facts import divisible
from sitsc.passes.shard_names import COMPLEX, ELEMENTWISE, LINEAR, SPLITS
from sitsc.passes.shard_rules import (
    attention,
    elementwise,
    embedding,
    joined,
    layer_norm,
    linear,
    reduction,
    rms_norm,
    rope,
    stacked,
)
from sitsc.passes.shard_table import shard_table
from sitsc.passes.shard_values import NOTE, Values
from sitsc.passes.shard_views import (
    expand,
    getitem,
    index,
    paired,
    reshape,
    select,
    slices,
    split,
    turned,
)

_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(LINEAR, linear),
    **dict.fromkeys(SPLITS, split),
    **dict.fromkeys(("reshape", "view", "unsqueeze", "squeeze", "flatten"), reshape),
    **dict.fromkeys(COMPLEX, paired),
    **dict.fromkeys(("transpose", "permute", "t"), turned),
    **dict.fromkeys(("clone", "contiguous", "alias"), elementwise),
    **dict.fromkeys(("mean", "sum", "amax", "softmax", "_softmax", "var"), reduction),
    **dict.fromkeys(("moe", "experts"), shard_experts),
    "glu": elementwise,
    "getitem": getitem,
    "expand": expand,
    "select": select,
    "slice": slices,
    "index": index,
    "cat": joined,
    "stack": stacked,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "native_layer_norm": layer_norm,
    "rope": rope,
    "embedding": embedding,
    "paged_attention": attention,
}


@dataclass(frozen=True, slots=True)
class Shard:
    """See the module. Raises PartitionError for a model that cannot be cut like this."""

    name: ClassVar[str] = "shard"
    preserves_numerics: ClassVar[bool] = True  # of all ranks together
    partition: Partition

    def run(self, graph: fx.Graph, context: PassContext) -> None:
        """Rewrite `graph` in place; one that is sharded already stays."""
        if calls(graph, "all_reduce", "all_gather"):
            return
        check_shards(self.partition, divisible(graph))
        if self.partition.tp == 1:
            return
        values = Values(graph, self.partition)
        columns = column_demands(graph, self.partition.tp)
        for node in list(graph.nodes):
            if node.op == "call_function":
                values.begin(node)
                rule = _RULES.get(_name(node)) if _needs_rule(values, node, columns) else None
                values.settle(node, rule(values, node, columns) if rule else values.plain(node))
            elif node.op == "output":
                values.finish(node)
        values.remove_old()


def _name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return ""
    return schema.name.split("::")[1]


def _needs_rule(values: Values, node: fx.Node, columns: Any) -> bool:
    """Whether an argument is not whole, or the call is one that is cut by itself."""
    cut = any(values.layout(a) is not None for a in node.all_input_nodes)
    own = _name(node) in ("moe", "experts", "embedding", "paged_attention")
    return cut or own or node in columns


def gathers(graph: fx.Graph) -> tuple[str, ...]:
    """What was made whole because an operator knows no parts: "model.layers.0: aten.foo" each."""
    notes = []
    for node in calls(graph, "all_gather"):
        if (reason := node.meta.get(NOTE)) is not None:
            notes.append(f"{module_path(node)}: {reason}")
    return tuple(notes)


def held_whole(graph: fx.Graph) -> tuple[str, ...]:
    """Matrices that every rank of a sharded graph holds and computes whole, by name."""
    cut, found = shard_table(graph).slices, []
    for node in graph.nodes:
        spec = weight_of(node)
        if spec is not None and spec.role == "weight" and len(spec.shape) > 1:
            if not any(source in cut for source in spec.sources) and cut:
                found.append(spec.name)
    return tuple(found)
