"""Small helpers that every pass uses: recognising operators, reading arguments, making nodes.

Arguments of `sitsc::` operators are read and written by the names of their schema.
"""

import operator
import re
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_aggregate

from sitsc.core.weights import DTYPES, WeightSpec

aten: Any = torch.ops.aten
ops: Any = torch.ops.sitsc

# A node, or whatever else stands as an argument of one. fx types arguments as a wide union that
# every access would have to narrow; code that matches graphs asks `is_op` first and then reads.
Node = Any

_LAYER = re.compile(r"(?:layers|h|blocks|block)\.(\d+)(?:\.|$)")


VIEWS = (
    "reshape",
    "select",
    "transpose",
    "unsqueeze",
    "slice",
    "split_with_sizes",
    "expand",
)


def is_view(node: Any) -> bool:
    """Whether a call only names a part of its argument's memory."""
    return is_op(node, *VIEWS) or getattr(node, "target", None) is operator.getitem


def is_op(value: Node, *names: str) -> bool:
    """Whether `value` is a call of one of the operators, named without their overload.

    A name with its namespace ("sitsc::rms_norm") tells ours from one of aten that is named alike.
    """
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return False
    schema = getattr(value.target, "_schema", None)
    return schema is not None and (schema.name in names or schema.name.split("::")[1] in names)


def calls(graph: fx.Graph, *names: str) -> list[Node]:
    """The calls of the operators in a graph, in order; a list, so that the graph may change."""
    return [node for node in graph.nodes if is_op(node, *names)]


def tensor(node: Node) -> Tensor:
    """The fake tensor of a node (shape, dtype)."""
    return node.meta["val"]


def same_shape(one: Node, two: Node) -> bool:
    """Whether two tensors have the same sizes, as text: comparing symbols could specialise them."""
    return [str(s) for s in tensor(one).shape] == [str(s) for s in tensor(two).shape]


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of a call by the names of its schema, defaults included."""
    schema = node.target._schema.arguments
    values = {a.name: a.default_value for a in schema}
    values |= {a.name: value for a, value in zip(schema, node.args, strict=False)}
    return values | dict(node.kwargs)


def set_arguments(node: Node, **changes: Any) -> None:
    """Replace named arguments of a call, writing all of them positionally."""
    values = arguments(node) | changes
    node.kwargs = {}
    node.args = tuple(values.values())


def fake(node: Node) -> None:
    """Compute `meta["val"]` of a call from the values of its arguments."""

    def value(item: Any) -> Any:
        return item.meta["val"] if isinstance(item, fx.Node) else item

    args = map_aggregate(node.args, value)
    kwargs = map_aggregate(node.kwargs, value)
    leaves = pytree.tree_leaves((args, kwargs))
    mode = detect_fake_mode([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    assert mode is not None
    with mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)


def call(graph: fx.Graph, target: Any, args: tuple[Any, ...], like: Node, **kwargs: Any) -> fx.Node:
    """A new call before the insertion point; module path from `like`, value computed."""
    node = graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    fake(node)
    return node


def replace(old: Node, new: Node) -> None:
    """Let `new` take every use of `old`; dead code is removed by the runner."""
    old.replace_all_uses_with(new)


def layer_of(node: Node) -> int | None:
    """The index of the decoder layer a node came from, from its module path."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        if found := _LAYER.search(path):
            return int(found.group(1))
    return None


def module_path(node: Node) -> str:
    """The innermost module path of a node, for people ("layers.3.mlp")."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].removeprefix("model.") if stack else ""


def weight_of(node: Node) -> WeightSpec | None:
    """The weight behind an argument, or None when it is not a weight placeholder."""
    return node.meta.get("weight") if isinstance(node, fx.Node) else None


def spec_of(node: Node) -> WeightSpec:
    """The weight of a placeholder that is known to be one."""
    return node.meta["weight"]


def add_weight(graph: fx.Graph, spec: WeightSpec, like: Node) -> Node:
    """A new weight placeholder, after the last placeholder."""
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        node = graph.placeholder("w_" + re.sub(r"\W", "_", spec.name))
    node.meta["weight"] = spec
    set_weight(node, spec, tensor(like))
    return node


def set_weight(node: Node, spec: WeightSpec, like: Tensor) -> None:
    """Give a placeholder a new spec and a fake value of the stored shape."""
    node.meta["weight"] = spec
    mode = detect_fake_mode([like])
    assert mode is not None
    with mode:
        node.meta["val"] = torch.empty(
            spec.stored_shape, dtype=DTYPES[spec.dtype], device=like.device
        )


def add_input(graph: fx.Graph, name: str, value: Tensor, dims: tuple[int | str, ...]) -> Node:
    """A new step input after the existing ones: a fake value, and the names of its dimensions."""
    inputs = [node for node in graph.nodes if node.op == "placeholder" and "input" in node.meta]
    with graph.inserting_after(inputs[-1]):
        node = graph.placeholder(name)
    node.meta["input"] = name
    node.meta["dims"] = dims
    node.meta["val"] = value
    return node
