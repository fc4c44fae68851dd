"""Any nn.Module as a plain graph: traced with example inputs, its weights named and readable.

In: a module on the CPU, example inputs, and what may vary of them as torch.export takes it. Out: a
`PlainGraph` whose placeholders are inputs by their names and one placeholder a weight; tied weights
are one. Copies no weight but vectors of up to eight values, which the compiled code may hold.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core.errors import UnsupportedModelError
from sitsc.core.plain import PlainGraph, PlainOutput
from sitsc.core.quiet import quiet
from sitsc.core.weights import DTYPES, TensorSlice, WeightSpec, constant_spec, dtype_name
from sitsc.frontend.bind import drop_assertions
from sitsc.frontend.decompose import decomposed
from sitsc.frontend.module_errors import export_error

_KNOWN_VALUES = 8
_LEAST = 2  # torch.export assumes at least two of what is free; its code serves one as well


def trace_plain(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> PlainGraph:
    """The plain graph of `module` for inputs like these. Raises UnsupportedModelError."""
    check_weights(module)
    _check_inputs(args, kwargs or {})
    program = export(module, args, kwargs or {}, dynamic_shapes, type(module).__name__)
    weights = read_weights(program)
    graph: fx.Graph = program.graph
    check_outputs(program, "")
    describe_weights(graph, program, weights, "")
    names = _describe_inputs(graph, program, dynamic_shapes)
    drop_assertions(graph)
    outputs = _name_outputs(graph, program)
    return PlainGraph(
        type(module).__name__,
        fx.GraphModule(nn.Module(), graph),
        outputs,
        _example_sizes(graph),
        _ranges(program, names),
        lambda name, start, stop: weights[name][start:stop],
    )


@contextmanager
def evaluated(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode; as it was afterwards, submodule by submodule."""
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def export(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any, name: str
) -> Any:
    """The exported program, functional and in evaluation mode. Raises UnsupportedModelError."""
    try:
        with evaluated(module), torch.no_grad(), quiet(logging.ERROR):
            program = torch.export.export(module, args, kwargs, strict=False, dynamic_shapes=shapes)
            return decomposed(program)
    except UnsupportedModelError:
        raise
    except Exception as error:  # torch.export raises many kinds, all for the user to read
        raise export_error(error, name) from error


def check_weights(module: nn.Module) -> None:
    """Raise UnsupportedModelError for a weight that is not a plain tensor on the CPU."""
    named: Any = [*module.named_parameters(), *module.named_buffers()]
    for name, value in named:
        if value.is_meta:
            raise UnsupportedModelError(f"{name} is on the meta device: it has no values")
        if value.device.type != "cpu":
            raise UnsupportedModelError(f"{name} lies on {value.device}", hint="module.cpu() first")
        if dtype_name(value.dtype) not in DTYPES or value.layout != torch.strided:
            raise UnsupportedModelError(
                f"{name} is a {value.layout} tensor of {value.dtype}",
                hint="complex tables: keep cos and sin as two real ones",
            )


def _check_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hint = "wrap the module in one whose forward takes tensors only"
    named = [*((str(i), value) for i, value in enumerate(args)), *kwargs.items()]
    if not named:
        raise UnsupportedModelError("no example inputs", hint="give example_inputs=(tensor, …)")
    for name, value in named:
        if not isinstance(value, Tensor):
            what = f"input {name} is a {type(value).__name__}, not a tensor"
            raise UnsupportedModelError(what, where="example_inputs", hint=hint)
        if dtype_name(value.dtype) not in DTYPES:
            raise UnsupportedModelError(f"input {name} is of {value.dtype}", where="example_inputs")
        if value.device.type != "cpu":
            what = f"input {name} lies on {value.device}"
            raise UnsupportedModelError(what, where="example_inputs", hint="use CPU tensors")


def check_outputs(program: Any, prefix: str) -> None:
    """Raise UnsupportedModelError for a forward that changes buffers or inputs."""
    for spec in program.graph_signature.output_specs:
        kind = spec.kind.name
        if kind == "USER_OUTPUT":
            continue
        what = "input" if kind == "USER_INPUT_MUTATION" else "buffer"
        name = str(spec.target).removeprefix(prefix)
        raise UnsupportedModelError(
            f"the forward changes {what} {name}",
            hint="return the new value instead, or keep state outside of the module",
        )


def read_weights(program: Any) -> dict[str, Tensor]:
    """Every parameter, buffer and lifted constant of a program by its name."""
    found: dict[str, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind.name in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR"):
            value = program.state_dict.get(spec.target)
            value = program.constants[spec.target] if value is None else value
            found[spec.target] = value.detach()
    return found


def describe_weights(
    graph: fx.Graph, program: Any, weights: dict[str, Tensor], prefix: str
) -> None:
    """Give each weight placeholder its spec; those of one tensor become one placeholder.

    Names lose `prefix` and `weights` gets them in that form too.
    """
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    owners: dict[Any, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if targets[node.name] not in weights:
            continue
        value = weights[targets[node.name]]
        same = (value.data_ptr(), tuple(value.shape), value.stride(), value.dtype)
        if value.numel() and same in owners:
            node.replace_all_uses_with(owners[same])
            graph.erase_node(node)
            continue
        owners[same] = node
        name = targets[node.name].removeprefix(prefix)
        weights[name] = value
        node.meta["weight"] = _spec(name, value)
        mode = detect_fake_mode([node.meta["val"]])
        assert mode is not None
        with mode:
            node.meta["val"] = torch.empty(tuple(value.shape), dtype=value.dtype)


def _spec(name: str, value: Tensor) -> WeightSpec:
    if value.dim() == 0 or (value.dim() == 1 and value.numel() <= _KNOWN_VALUES):
        return constant_spec(name, value)
    shape = tuple(value.shape)
    source = TensorSlice(name, 0, shape[0])
    return WeightSpec(name, "weight", (source,), shape, dtype_name(value.dtype), "plain", "")


def _describe_inputs(graph: fx.Graph, program: Any, shapes: Any) -> dict[str, str]:
    """Give each input its name and the names of its sizes; those names by symbol."""
    specs = [s for s in program.graph_signature.input_specs if s.kind.name == "USER_INPUT"]
    by_name = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for spec in specs:
        if type(spec.arg).__name__ != "TensorArgument":
            raise UnsupportedModelError(f"input {spec.arg.name} is no tensor")
    inputs = [by_name[spec.arg.name] for spec in specs]
    labels = _labels(shapes, [node.name for node in inputs])
    names: dict[str, str] = {}
    for node in inputs:
        for index, size in enumerate(node.meta["val"].shape):
            if not isinstance(size, int) and size.node.expr.is_symbol:
                label = labels.get((node.name, index), "")
                usual = label if label.isidentifier() else f"{node.name}_{index}"
                names.setdefault(str(size), usual)
    for node in inputs:
        shape = node.meta["val"].shape
        node.meta["input"] = node.name
        node.meta["dims"] = tuple(s if isinstance(s, int) else _named(s, names) for s in shape)
        node.meta["example"] = tuple(s if isinstance(s, int) else _hint(s) for s in shape)
    return names


def _named(size: Any, names: dict[str, str]) -> str:
    """A size as text with readable names: "batch", "2*batch"."""
    import sympy  # noqa: PLC0415  (comes with torch)

    expression = size.node.expr
    if {str(s) for s in expression.free_symbols} - set(names):
        raise UnsupportedModelError(
            f"the size {expression} of an input derives from one that no input has",
            hint="give every input of that kind a Dim of its own",
        )
    known = {s: sympy.Symbol(names[str(s)]) for s in expression.free_symbols}
    return str(expression.subs(known)).replace(" ", "")


def _hint(size: Any) -> int:
    return int(size.node.hint)


def _labels(shapes: Any, inputs: list[str]) -> dict[tuple[str, int], str]:
    """Names that `dynamic_shapes` gives to dimensions, by input and index."""
    found: dict[tuple[str, int], str] = {}
    entries = (
        shapes.items() if isinstance(shapes, dict) else zip(inputs, shapes or (), strict=False)
    )
    for name, entry in entries:
        pairs = entry.items() if isinstance(entry, dict) else enumerate(entry or ())
        for index, dim in pairs:
            found[name, index] = getattr(dim, "__name__", "")
    return found


def _example_sizes(graph: fx.Graph) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in graph.find_nodes(op="placeholder"):
        for dim, size in zip(node.meta.get("dims", ()), node.meta.get("example", ()), strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                found[dim] = size
    return found


def _ranges(program: Any, names: dict[str, str]) -> dict[str, tuple[int, int]]:
    found = {}
    for symbol, bounds in program.range_constraints.items():
        if str(symbol) in names:
            least = int(bounds.lower)
            most = int(bounds.upper) if str(bounds.upper).isdigit() else 0
            found[names[str(symbol)]] = (least if least > _LEAST else 1, most)
    return found


def _name_outputs(graph: fx.Graph, program: Any) -> tuple[PlainOutput, ...]:
    """Names of what the forward returns; the graph then returns its tensors."""
    output: Any = graph.output_node()
    flat = list(output.args[0])
    spec = program.call_spec.out_spec
    paths = [
        path for path, _ in pytree.tree_flatten_with_path(pytree.tree_unflatten(flat, spec))[0]
    ]
    found, kept = [], []
    for path, value in zip(paths, flat, strict=True):
        if value is not None and not isinstance(value, fx.Node):
            what = f"the forward returns {value!r} beside tensors"
            raise UnsupportedModelError(what, hint="return tensors only")
        if len(path) > 1:
            raise UnsupportedModelError(
                f"the forward returns nested values ({pytree.keystr(path)})",
                hint="return a tensor, a tuple of tensors, or a dictionary of them",
            )
        found.append(_output(path, value is None))
        kept += [] if value is None else [value]
    output.args = (kept[0] if len(kept) == 1 else tuple(kept),)
    return tuple(item for item in found if item.place != "key" or not item.is_none)


def _output(path: Any, is_none: bool) -> PlainOutput:
    if not path:
        return PlainOutput("output", "tensor", is_none)
    if isinstance(path[0], pytree.SequenceKey):
        return PlainOutput(f"output_{path[0].idx}", "item", is_none)
    key = getattr(path[0], "key", getattr(path[0], "name", None))
    return PlainOutput(str(key), "key", is_none)
