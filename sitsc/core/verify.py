"""The verifier: what must hold of a graph after every pass.

Every node has a value, values agree with what the operator computes from its arguments, every input
is described, and definitions come before uses. Errors show the node with five lines around it, its
module path and the pass that ran last.
"""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.node import map_aggregate

from sitsc.core.errors import GraphError
from sitsc.core.printer import Printer


def verify_graph(graph: fx.Graph, after: str, known: dict[Any, Any] | None = None) -> None:
    """Raise GraphError when `graph` is not valid; `after` names the pass that ran last.

    `known` keeps what operators compute from one call to the next, for one graph and its changes.
    """
    _check_form(graph, after)
    outputs = [node for node in graph.nodes if node.op == "output"]
    results = outputs[0].args[0] if len(outputs) == 1 else None
    results = results if isinstance(results, tuple) else (results,)
    if not results or not all(isinstance(result, fx.Node) for result in results):
        raise GraphError("a graph returns one tensor or a tuple of them", where=f"after {after}")
    known = {} if known is None else known
    for node in graph.nodes:
        if node.op == "placeholder":
            _check_placeholder(graph, node, after)
        elif node.op == "call_function":
            _check_call(graph, node, after, known)
        elif node.op != "output":
            _fail(graph, node, after, f"unexpected node kind {node.op}")


def _check_form(graph: fx.Graph, after: str) -> None:
    """What fx itself asks for: definitions before uses, unique names, users in step with uses."""
    try:
        graph.lint()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise GraphError(str(error).splitlines()[0], where=f"after {after}") from error


def _check_placeholder(graph: fx.Graph, node: fx.Node, after: str) -> None:
    if ("weight" in node.meta) == ("input" in node.meta):
        _fail(graph, node, after, "a placeholder is a weight or a step input")
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        _fail(graph, node, after, "no value")
    elif (spec := node.meta.get("weight")) is not None:
        if tuple(value.shape) != tuple(spec.stored_shape):
            _fail(graph, node, after, f"shape {tuple(value.shape)}, planned {spec.stored_shape}")
    elif len(node.meta.get("dims", ())) != value.dim():
        _fail(graph, node, after, "a step input names each of its dimensions")


def _check_call(graph: fx.Graph, node: fx.Node, after: str, known: dict[Any, Any]) -> None:
    if "val" not in node.meta:
        _fail(graph, node, after, "no value")
    fresh = _recompute(node, known)
    if isinstance(fresh, Tensor):
        kept = node.meta["val"]
        if not isinstance(kept, Tensor) or fresh.dtype != kept.dtype:
            _fail(
                graph, node, after, f"computes {fresh.dtype}, says {getattr(kept, 'dtype', kept)}"
            )
        elif [str(s) for s in fresh.shape] != [str(s) for s in kept.shape]:
            _fail(graph, node, after, f"computes {list(fresh.shape)}, says {list(kept.shape)}")


def _recompute(node: fx.Node, known: dict[Any, Any]) -> Any:
    """The value of a call from its arguments' values; None when the arguments hold no tensor.

    Layers are alike: what was computed of arguments of the same form is found in `known`.
    """

    def value(item: Any) -> Any:
        return item.meta.get("val") if isinstance(item, fx.Node) else item

    args = map_aggregate(node.args, value)
    kwargs = map_aggregate(node.kwargs, value)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    mode = detect_fake_mode([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    if mode is None:
        return None
    target: Any = node.target
    form = (target, str(tree), *(_form(leaf) for leaf in leaves))
    if form not in known:
        with mode, torch.no_grad():
            known[form] = target(*args, **kwargs)
    return known[form]


def _form(leaf: Any) -> Any:
    """What of an argument decides the form of a result: its kind, and sizes but no numbers."""
    if not isinstance(leaf, Tensor):
        return type(leaf), str(leaf)
    sizes = (*leaf.shape, None, *leaf.stride(), leaf.storage_offset())
    symbols = tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes)
    return leaf.dtype, leaf.device, symbols


def _fail(graph: fx.Graph, node: fx.Node, after: str, why: str) -> None:
    printer = Printer(graph)
    nodes = list(graph.nodes)
    at = nodes.index(node)
    lines = [printer.line(n) for n in nodes[max(0, at - 5) : at + 6]]
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else "no module"
    error = GraphError(f"{why} at {printer.names[node]} ({path})", where=f"after {after}")
    error.add_note("\n".join(lines))
    raise error
