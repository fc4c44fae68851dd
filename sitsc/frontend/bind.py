"""What torch.export gives as a graph of ours: every placeholder described, one plain output.

In: the exported program, values of constants, owners of tied parameters. Out: a GraphModule whose
placeholders are step inputs (`meta["input"]`, `meta["dims"]`) and weights (`meta["weight"]`).
"""

from typing import Any

import torch
from torch import Tensor, fx, nn

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.weights import TensorSlice, WeightSpec, constant_spec, dtype_name
from sitsc.frontend.experts import Stacked

STEP_INPUTS = {"token_ids": "tokens", "position_ids": "tokens", "logit_rows": "rows"}
_MAX_CONSTANT_BYTES = 1 << 16


def bind(
    program: Any,
    constants: dict[str, Tensor],
    owners: dict[str, str],
    stacked: dict[str, Stacked],
) -> fx.GraphModule:
    """The graph of an exported program. Raises UnsupportedModelError for what cannot be described.

    `constants` are the values of buffers that no checkpoint holds, `owners` the name of the tensor
    behind each parameter, `stacked` what parameters of experts are made of; all by the names of the
    model.
    """
    graph: fx.Graph = program.graph
    for spec in program.graph_signature.output_specs:
        if spec.kind.name != "USER_OUTPUT":
            raise UnsupportedModelError(
                f"the model changes {spec.target.removeprefix('model.')} as it runs",
                hint="a dynamic rotary scaling, for one: its tables depend on the whole batch",
            )
    constants = constants | _lifted(program)
    _describe(graph, program.graph_signature.input_specs, constants, owners, stacked)
    drop_assertions(graph)
    output: Any = graph.output_node()
    output.args = (output.args[0][0],)
    return fx.GraphModule(nn.Module(), graph)


def _lifted(program: Any) -> dict[str, Tensor]:
    """Tensors that the model made while it was traced; on the meta device their values are lost."""
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind.name == "CONSTANT_TENSOR":
            value = program.constants[spec.target]
            name = spec.target.removeprefix("model.")
            nothing = torch.full(value.shape, float("nan"))
            found[name] = nothing if value.is_meta else value
    return found


def _describe(
    graph: fx.Graph,
    inputs: list[Any],
    constants: dict[str, Tensor],
    owners: dict[str, str],
    stacked: dict[str, Stacked],
) -> None:
    """Say of every placeholder which step input or weight it is; tied weights become one."""
    targets: dict[str, str | None] = {spec.arg.name: spec.target for spec in inputs}
    by_name: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        target = targets[node.name]
        if target is None:
            node.meta["input"] = node.name
            node.meta["dims"] = (STEP_INPUTS[node.name],)
            continue
        name = target.removeprefix("model.")
        if name in stacked:
            _stack(node, name, stacked[name])
            continue
        spec = _spec(owners.get(name, name), node.meta["val"], constants)
        if spec.name in by_name:
            node.replace_all_uses_with(by_name[spec.name])
            graph.erase_node(node)
            continue
        node.meta["weight"] = spec
        by_name[spec.name] = node


def _stack(node: fx.Node, name: str, stacked: Stacked) -> None:
    """Give a parameter of experts its canonical shape; only sitsc::experts reads it."""
    value: Tensor = node.meta["val"]
    kind = dtype_name(value.dtype)
    node.meta["weight"] = WeightSpec(
        name, "weight", stacked.sources, stacked.shape, kind, "plain", ""
    )
    node.meta["val"] = value.new_empty(stacked.shape)


def drop_assertions(graph: fx.Graph) -> None:
    """Erase run-time assertions, and the weights that nothing reads."""
    for node in reversed(list(graph.nodes)):
        assertion = "_assert" in str(node.target) or "sym_constrain" in str(node.target)
        if not node.users and (assertion or "weight" in node.meta):
            graph.erase_node(node)


def _spec(name: str, value: Tensor, constants: dict[str, Tensor]) -> WeightSpec:
    if name in constants:
        tensor = constants[name]
        if tensor.numel() * tensor.element_size() > _MAX_CONSTANT_BYTES:
            raise UnsupportedModelError(
                f"constant {name} is larger than {_MAX_CONSTANT_BYTES} bytes"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UnsupportedModelError(f"the value of buffer {name} is not known from the config")
        return constant_spec(name, tensor)
    shape = tuple(int(size) for size in value.shape)
    if not shape:
        raise UnsupportedModelError(f"parameter {name} has no dimension")
    source = TensorSlice(name, 0, shape[0])
    return WeightSpec(name, "weight", (source,), shape, dtype_name(value.dtype), "plain", "")
