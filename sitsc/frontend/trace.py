"""Tracing: a model configuration to a flat FX graph of aten operators, on the meta device.

In: a configuration as a dictionary. Out: a GraphModule whose placeholders are the step inputs
(token_ids, position_ids, logit_rows) and one placeholder a weight, described by `meta["weight"]`.
Runs transformers' modelling code; reads no weight, runs no code that comes with a checkpoint.
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core.errors import UnsupportedModelError
from sitsc.frontend.apart import check_tokens_apart
from sitsc.frontend.bind import bind
from sitsc.frontend.checkpoint_names import renamed
from sitsc.frontend.decompose import decomposed
from sitsc.frontend.experts import experts, stacked_parameters
from sitsc.frontend.longrope import long_frequencies, takes_long_factors
from sitsc.frontend.masks import OWN, OWN_HINT, agreed_window, told_masks

_HARMLESS = {"position_ids", "use_cache", "output_attentions", "output_hidden_states"}
_HARMLESS |= {"output_router_logits", "return_dict", "cache_position"}


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
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface, ending in one operator a layer."""
    _refuse_unknown(module, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = int(getattr(module, "layer_idx", 0) or 0)
    window = agreed_window(attention_mask, int(sliding_window or 0), layer)
    out = torch.ops.sitsc.attention(
        query, key, value, s_aux, layer, float(scale), window, softcap or 0.0
    )
    return out, None


def _refuse_unknown(module: nn.Module, options: dict[str, Any]) -> None:
    """Raise UnsupportedModelError for attention that is more than causal attention over q, k, v."""
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError("the model sees later tokens: only causal attention is known")
    for name, value in options.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise UnsupportedModelError(
                f"attention takes {name!r}, which the compiler does not know"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def build_model(config: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """The transformers module of `config` on the meta device. Raises UnsupportedModelError."""
    import transformers  # noqa: PLC0415  (heavy; only compiling needs it)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # noqa: PLC0415
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    kind = config.get("model_type")
    values = {k: copy.deepcopy(v) for k, v in config.items() if k != "model_type"}  # it writes
    values.pop("dtype", None)
    values.pop("torch_dtype", None)
    ALL_ATTENTION_FUNCTIONS.register("sitsc", _attention)
    ALL_EXPERTS_FUNCTIONS.register("sitsc", experts)
    try:
        parsed = transformers.AutoConfig.for_model(str(kind), **values)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                parsed,
                attn_implementation="sitsc",
                experts_implementation="sitsc",
                dtype=dtype,
            )
    except Exception as error:  # transformers checks values in many ways and by many classes
        if isinstance(error, KeyError) and error.args == ("sitsc",):
            raise UnsupportedModelError(OWN, where="config.json", hint=OWN_HINT) from error
        raise UnsupportedModelError(
            f"model_type {kind!r} cannot be built: {' '.join(str(error).split())[:200]}",
            where="config.json",
            hint="is it a decoder-only language model of a family that transformers knows?",
        ) from error
    return model.eval()


def _freeze_rope(model: Any, constants: dict[str, Tensor], long: bool) -> None:
    """Let longrope keep one set of factors: the short ones that it starts with, or the long."""
    for path, module in model.named_modules():
        if getattr(module, "rope_type", None) == "longrope":
            if "short_mscale" in module.config.rope_parameters:
                raise UnsupportedModelError(
                    "longrope with short_mscale and long_mscale: which of them scales the rotation "
                    "depends on the longest sequence of a batch",
                    where="config.json",
                )
            module.rope_type = "default"
            if long:
                constants[f"{path}.inv_freq"] = long_frequencies(module.config)


def _constants(model: Any) -> dict[str, Tensor]:
    """Values of the buffers that a checkpoint does not hold, computed from the configuration.

    A value that transformers does not compute stays NaN; `bind` refuses it when it is read.
    """
    values: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = [name for name in module._buffers if name in module._non_persistent_buffers_set]
        for name in own:
            buffer = module._buffers[name]
            unknown = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full_like(buffer, unknown, device="cpu")
        if own:
            model._init_weights(module)
        for name in own:
            values[f"{path}.{name}"] = module._buffers[name]
            module._buffers[name] = module._buffers[name].to("meta")
    return values


def _export(model: nn.Module) -> Any:
    tokens, rows = torch.export.Dim("tokens", min=1), torch.export.Dim("rows", min=1)
    ids = torch.zeros(24, dtype=torch.long, device="meta")
    wanted = torch.zeros(7, dtype=torch.long, device="meta")
    shapes = {"token_ids": {0: tokens}, "position_ids": {0: tokens}, "logit_rows": {0: rows}}
    with torch.no_grad(), _quiet(), told_masks("sitsc"):
        program = torch.export.export(
            _Decoder(model), (ids, ids.clone(), wanted), strict=False, dynamic_shapes=shapes
        )
        return decomposed(program)


def trace(config: dict[str, Any], dtype: torch.dtype, context: int = 0) -> fx.GraphModule:
    """The FX graph of `config` in `dtype`. Raises UnsupportedModelError when that cannot be had.

    `context` is the longest sequence, which decides the factors of longrope; 0: within its switch.
    """
    model = build_model(config, dtype)
    constants = _constants(model)
    _freeze_rope(model, constants, takes_long_factors(config, context))
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
    module = bind(program, constants, _owners(model, constants), stacked_parameters(model))
    _check_complete(module.graph, model)
    check_tokens_apart(module.graph)
    return module


def _check_complete(graph: fx.Graph, model: Any) -> None:
    """Raise UnsupportedModelError for what would go unseen: attention or positions of another kind.

    A layer whose tokens meet outside of our attention would mix the sequences of a batch.
    """
    layers = model.config.get_text_config().num_hidden_layers
    found = sum(node.target is torch.ops.sitsc.attention.default for node in graph.nodes)
    if found != layers:
        raise UnsupportedModelError(
            f"{found} of {layers} layers have attention that the compiler knows",
            hint="layers without attention, or with their own code for it, cannot be compiled",
        )
    if not graph.find_nodes(op="placeholder", target="position_ids")[0].users:
        raise UnsupportedModelError("the model does not read the positions of its tokens")


def _owners(model: Any, constants: dict[str, Tensor]) -> dict[str, str]:
    """The first name of each tensor of checkpoints, by all its names: tied ones have one owner."""
    first: dict[int, str] = {}
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    kind = getattr(model.config, "model_type", "")
    return {
        name: renamed(first.setdefault(id(value), name), kind)
        for name, value in every
        if name not in constants
    }
