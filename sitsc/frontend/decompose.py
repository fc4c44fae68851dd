"""An exported program in functional operators, as `run_decompositions({})` gives it, but sooner.

In: a program of torch.export. Out: the same program; operators that stand for others and may
return what they were given (`to`, `reshape`, `chunk` …) have become those others. torch traces a
whole program twice for that, which takes longer than to export it: 15 s for 32 layers. Here each
such operator is called once with the fake tensors that the graph carries. What asks for more, a
program that writes into views of tensors for one, is left to torch.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_NUMBERS = (torch.SymInt, torch.SymBool, torch.SymFloat)


class _NotSimpleError(Exception):
    """The program needs more than other operators in the places of single ones."""


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator that another one called; `out` is what it gave."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a node stands for: calls, and its value. `values` are its inputs' identities."""

    values: list[int]
    calls: list[_Call]
    out: Any
    sizes: dict[Any, fx.Node]  # nodes by the expressions that the calls take


class _Recorder(TorchDispatchMode):
    """Keeps every operator that gives tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(out)):
            self.calls.append(_Call(func, args, kwargs, out))
        return out


def decomposed(program: Any) -> Any:
    """What `program.run_decompositions({})` is; `program` itself must not be used afterwards."""
    graph: Any = program.graph
    try:
        nodes = list(_work(graph))
        parts = _all_parts(graph, set(nodes))
    except _NotSimpleError:
        return program.run_decompositions({})
    for node in nodes:
        if node in parts:
            _replace(graph, node, parts[node])
        else:
            _make_functional(graph, node)
    graph.eliminate_dead_code()
    graph.lint()
    return program


def _work(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes to be replaced, in order. Raises _NotSimpleError."""
    for node in graph.nodes:
        if node.op != "call_function":
            if node.op not in ("placeholder", "output"):
                raise _NotSimpleError(node.op)
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            if not isinstance(node.meta.get("val"), _NUMBERS) and node.target != operator.getitem:
                raise _NotSimpleError(str(node.target))  # a graph within the graph
            continue
        if node.target._schema.is_mutable:
            _check_owned(node)
            yield node
        elif _may_alias(node.target) and _is_composite(node.target):
            yield node


def _may_alias(target: Any) -> bool:
    """Whether a result may be an argument, or a view of one."""
    aliases = any(argument.alias_info is not None for argument in target._schema.arguments)
    return aliases or torch.Tag.maybe_aliasing_or_mutating in target.tags


def _is_composite(target: Any) -> bool:
    known = torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), _COMPOSITE)
    return known or _COMPOSITE in target.py_kernels


# --- operators that stand for others ------------------------------------------------------------


def _all_parts(graph: fx.Graph, work: set[fx.Node]) -> dict[fx.Node, _Parts]:
    """What the nodes stand for that write over nothing. Raises _NotSimpleError."""
    found, sizes = {}, dict[Any, fx.Node]()
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.SymInt):
            sizes.setdefault(node.meta["val"].node.expr, node)
        if node in work and not node.target._schema.is_mutable:
            found[node] = _parts(node, dict(sizes))
    return found


def _inputs(node: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if _is_node(leaf)]


def _is_node(value: Any) -> bool:
    return isinstance(value, fx.Node)


def _parts(node: Any, sizes: dict[Any, fx.Node]) -> _Parts:
    """Call the operator of a node. Raises _NotSimpleError where it calls what stands for others."""
    values = [id(one.meta["val"]) for one in _inputs(node)]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    with torch.no_grad(), _Recorder() as recorder:
        out = node.target(*args, **kwargs)
        if id(out) in values and torch.Tag.maybe_aliasing_or_mutating in node.target.tags:
            out = torch.ops.aten.clone.default(out)  # its schema promises a tensor of its own
    known = set(values)
    for call in recorder.calls:
        if _is_composite(call.target) or call.target._schema.is_mutable:
            raise _NotSimpleError(f"{node.target} calls {call.target}")
        for leaf in pytree.tree_leaves((call.args, call.kwargs)):
            expression = leaf.node.expr if isinstance(leaf, _NUMBERS) else None
            if expression is not None and not expression.is_number and expression not in sizes:
                raise _NotSimpleError(f"{node.target} computes a size")
        known |= {id(leaf) for leaf in pytree.tree_leaves(call.out)}
    if any(id(leaf) not in known for leaf in pytree.tree_leaves(out)):
        raise _NotSimpleError(f"{node.target} gives what it did not make")
    return _Parts(values, recorder.calls, out, sizes)


def _replace(graph: fx.Graph, node: Any, parts: _Parts) -> None:
    """Put the calls in the place of a node."""
    nodes = dict(zip(parts.values, _inputs(node), strict=True))

    def own(value: Any) -> Any:
        if isinstance(value, _NUMBERS):
            number = value.node.expr
            return int(number) if number.is_number else parts.sizes[number]
        return nodes.get(id(value), value)

    with graph.inserting_before(node):
        for call in parts.calls:
            args, kwargs = pytree.tree_map(own, (call.args, call.kwargs))
            name = call.target.overloadpacket.__name__
            made = graph.create_node("call_function", call.target, args, kwargs, name)
            made.meta = node.meta | {"val": call.out}
            nodes |= _results(graph, made)
    if isinstance(parts.out, Tensor):
        _forward(graph, node, nodes[id(parts.out)])
        return
    for user in list(node.users):
        _forward(graph, user, nodes[id(parts.out[user.args[1]])])
    graph.erase_node(node)


def _results(graph: fx.Graph, made: Any) -> dict[int, fx.Node]:
    """By identity of their values: a node, or those that take the tensors out of its list."""
    value = made.meta["val"]
    if isinstance(value, Tensor):
        return {id(value): made}
    found = {}
    for index, one in enumerate(value):
        found[id(one)] = graph.create_node("call_function", operator.getitem, (made, index))
        found[id(one)].meta = made.meta | {"val": one}
    return found


def _forward(graph: fx.Graph, node: Any, other: fx.Node) -> None:
    """Let `other` stand for a node from now on."""
    node.replace_all_uses_with(other)
    graph.erase_node(node)


# --- operators that write over what they were given ----------------------------------------------


def _functional(target: Any) -> Any:
    """The operator that gives what another one writes: `div` for `div_`; None without one."""
    name = target.overloadpacket.__name__
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None) if name.endswith("_") else None
    return getattr(packet, target._overloadname, None)


def _check_owned(node: Any) -> None:
    """Raise _NotSimpleError unless a node writes over one tensor that nothing else can see."""
    written = [
        a.alias_info is not None and a.alias_info.is_write for a in node.target._schema.arguments
    ]
    functional = _functional(node.target)
    if functional is None or written != [True, *[False] * (len(written) - 1)]:
        raise _NotSimpleError(str(node.target))
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    with torch.no_grad():
        out, base = functional(*args, **kwargs), args[0]
    if out.dtype != base.dtype or out.shape != base.shape:
        raise _NotSimpleError(f"{node.target} casts what it writes")
    maker = node.args[0]
    while maker.target == operator.getitem:
        maker = maker.args[0]
    if not isinstance(maker.target, torch._ops.OpOverload) or _may_alias(maker.target):
        raise _NotSimpleError(f"{node.target} writes over an input or a view")
    for user in node.args[0].users:
        seen = user is not node and isinstance(user.target, torch._ops.OpOverload)
        if (seen and _may_alias(user.target)) or user.op == "output":
            raise _NotSimpleError(f"{node.target} writes over what has views")


def _make_functional(graph: fx.Graph, node: Any) -> None:
    """What was written over is from here on what the operator gives."""
    base = node.args[0]
    later = set(_after(node))
    with graph.inserting_before(node):
        target = _functional(node.target)
        name = target.overloadpacket.__name__
        made = graph.create_node("call_function", target, node.args, node.kwargs, name)
        made.meta = dict(node.meta)
    base.replace_all_uses_with(made, lambda user: user in later)
    _forward(graph, node, made)


def _after(node: Any) -> Iterator[fx.Node]:
    while node.next.op != "root":
        node = node.next
        yield node
