"""Tracing: a model configuration to a flat FX graph of aten operators, on the meta device.

In: a configuration as a dictionary. Out: a GraphModule whose placeholders are the step inputs
(token_ids, position_ids, logit_rows) and one placeholder a weight, described by `meta["weight"]`.
Runs transformers' modelling code; reads no weight, runs no code that comes with a checkpoint.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core.errors import UnsupportedModelError
from sitsc.core.weights import TensorSlice, WeightSpec, constant_spec, dtype_name

STEP_INPUTS = {"token_ids": "tokens", "position_ids": "tokens", "logit_rows": "rows"}
_MAX_CONSTANT_BYTES = 1 << 16


class _Decoder(nn.Module):
    """The model as a function of one flat step: [tokens] ids in, [rows, vocabulary] logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        return self.model(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            logits_to_keep=logit_rows,
            use_cache=False,
            return_dict=False,
        )[0].float()[0]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, ending in one operator a layer."""
    if attention_mask is not None:
        raise UnsupportedModelError("the model passes its own attention mask")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(getattr(module, "layer_idx", 0) or 0)
    out = torch.ops.sitsc.attention(
        query, key, value, s_aux, layer, float(scale), int(sliding_window or 0), softcap or 0.0
    )
    return out, None


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build_model(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """The transformers module of `config` on the meta device. Raises UnsupportedModelError."""
    import transformers  # noqa: PLC0415  (heavy; only compiling needs it)
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    kind = config.get("model_type")
    values = {key: value for key, value in config.items() if key != "model_type"}
    values.pop("dtype", None)
    values.pop("torch_dtype", None)
    ALL_ATTENTION_FUNCTIONS.register("sitsc", _attention)
    try:
        parsed = transformers.AutoConfig.for_model(str(kind), **values)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                parsed, attn_implementation="sitsc", dtype=dtype
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModelError(
            f"model_type {kind!r} cannot be built: {str(error).splitlines()[0][:160]}",
            where="config.json",
            hint="is it a decoder-only language model of a family that transformers knows?",
        ) from error
    return model.eval()


def _constants(model: Any) -> dict[str, Tensor]:
    """Values of the buffers that a checkpoint does not hold, computed from the configuration."""
    values: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = {name: b for name, b in module.named_buffers(recurse=False) if b is not None}
        if not own:
            continue
        for name, buffer in own.items():
            module._buffers[name] = (
                torch.full_like(buffer, float("nan"), device="cpu")
                if (buffer.is_floating_point())
                else torch.zeros_like(buffer, device="cpu")
            )
        model._init_weights(module)
        for name in own:
            value = module._buffers[name]
            values[f"{path}.{name}"] = value
            module._buffers[name] = value.to("meta")
    return values


def _export(model: nn.Module) -> Any:
    tokens, rows = torch.export.Dim("tokens", min=1), torch.export.Dim("rows", min=1)
    ids = torch.zeros(24, dtype=torch.long, device="meta")
    wanted = torch.zeros(7, dtype=torch.long, device="meta")
    shapes = {"token_ids": {0: tokens}, "position_ids": {0: tokens}, "logit_rows": {0: rows}}
    with torch.no_grad(), _quiet():
        program = torch.export.export(
            _Decoder(model), (ids, ids.clone(), wanted), strict=False, dynamic_shapes=shapes
        )
        return program.run_decompositions({})


def trace(config: dict[str, Any], dtype: torch.dtype) -> fx.GraphModule:
    """The FX graph of `config` in `dtype`. Raises UnsupportedModelError when that cannot be had."""
    model = build_model(config, dtype)
    constants = _constants(model)
    owners = _owners(model)
    try:
        program = _export(model)
    except UnsupportedModelError:
        raise
    except Exception as error:  # torch.export raises many kinds; all mean the same to a user
        raise UnsupportedModelError(
            f"torch.export cannot trace {config.get('model_type')!r}: "
            f"{str(error).strip().splitlines()[0][:200]}",
            hint="report the architecture; nothing was written",
        ) from error
    graph: fx.Graph = program.graph
    _describe(graph, program.graph_signature.input_specs, constants, owners)
    drop_assertions(graph)
    output: Any = graph.output_node()
    output.args = (output.args[0][0],)
    return fx.GraphModule(nn.Module(), graph)


def _owners(model: nn.Module) -> dict[str, str]:
    """The first name of every parameter, by each of its names: tied ones have one owner."""
    first: dict[int, str] = {}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in every}


def _describe(
    graph: fx.Graph, inputs: list[Any], constants: dict[str, Tensor], owners: dict[str, str]
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
        spec = _spec(owners.get(name, name), node.meta["val"], constants)
        if spec.name in by_name:
            node.replace_all_uses_with(by_name[spec.name])
            graph.erase_node(node)
            continue
        node.meta["weight"] = spec
        by_name[spec.name] = node


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
    source = TensorSlice(name, 0, shape[0])
    return WeightSpec(name, "weight", (source,), shape, dtype_name(value.dtype), "plain", "")
