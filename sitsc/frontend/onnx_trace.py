"""From an ONNX program to the graph that tracing a model gives: the same inputs, one attention op.

In: a `Program` of a decoder, with or without past keys and values (which are fed empty: one paged
operator holds them later). Out: a GraphModule over token_ids, position_ids, logit_rows and weights.
"""

import logging
from typing import Any

import torch
from torch import Tensor, fx, nn

import sitsc.core.ops  # noqa: F401  (registers the operators)
from sitsc.core.errors import SitscError, UnsupportedModelError
from sitsc.core.quiet import quiet
from sitsc.core.weights import materialise
from sitsc.frontend.apart import check_tokens_apart
from sitsc.frontend.bind import STEP_INPUTS, bind, drop_assertions
from sitsc.frontend.checkpoint_types import Checkpoint
from sitsc.frontend.decompose import decomposed
from sitsc.frontend.onnx_attention import is_call, replace_attention
from sitsc.frontend.onnx_checkpoint import check_vocabulary, half_dtype
from sitsc.frontend.onnx_file import OnnxInput
from sitsc.frontend.onnx_module import OnnxModule
from sitsc.frontend.onnx_program import Program, logits_index
from sitsc.frontend.onnx_rows import check_rows, use_positions
from sitsc.frontend.onnx_values import TokenValues
from sitsc.frontend.safe_files import shown

_HINT = "input_ids, attention_mask, position_ids and past_key_values are known"


class Step(nn.Module):
    """The graph as a function of one flat step; batch size 1, no past."""

    def __init__(self, model: OnnxModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        inputs = {
            item.name: _input(item, token_ids, position_ids)
            for item in self.model.program.file.inputs
        }
        outputs = self.model(inputs)
        logits = outputs[logits_index(self.model.program)]
        if not isinstance(logits, Tensor) or logits.dim() != 3:
            raise UnsupportedModelError("the first output is not [batch, tokens, vocabulary]")
        return logits[:, logit_rows, :].float()[0]


def _input(item: OnnxInput, token_ids: Tensor, position_ids: Tensor) -> Tensor:
    """What a step gives for an input of the graph. Raises UnsupportedModelError for others."""
    rank, integer = len(item.shape), not item.dtype.is_floating_point
    if item.name == "input_ids" and rank == 2 and integer:
        return token_ids[None].to(item.dtype)
    if item.name == "position_ids" and rank == 2:
        return position_ids[None].to(item.dtype)
    if item.name == "cache_position" and rank == 1:
        return position_ids.to(item.dtype)
    if item.name == "attention_mask" and rank == 2:
        return torch.ones(1, token_ids.shape[0], dtype=item.dtype, device="meta")
    if item.name == "token_type_ids" and rank == 2:
        return torch.zeros(1, token_ids.shape[0], dtype=item.dtype, device="meta")
    past = any(word in item.name for word in ("past", "key", "value", "cache"))
    if past and rank == 4 and not integer:
        return torch.empty(_past_shape(item), dtype=item.dtype, device="meta")
    raise UnsupportedModelError(f"input {shown(item.name)} is not known", hint=_HINT)


def _past_shape(item: OnnxInput) -> tuple[int, ...]:
    heads, dim = item.shape[1], item.shape[3]
    if heads is None or dim is None or not (0 < heads < 1 << 16 and 0 < dim < 1 << 16):
        raise UnsupportedModelError(
            f"{shown(item.name)} is not [batch, heads, past, dim] of fixed heads and dim",
            hint="export with dynamic axes for batch and past alone",
        )
    return 1, heads, 0, dim


def trace_program(program: Program, half: torch.dtype) -> fx.GraphModule:
    """The graph of a decoder; half precision is computed in `half`. Raises UnsupportedModelError"""
    model = OnnxModule(program, half)
    try:
        exported = _export(model)
        constants = {model.owners.get(k, k): v for k, v in model.values.items()}
        _lift(exported, model.values)
    except SitscError:
        raise
    except Exception as error:  # torch.export raises many kinds; all mean the same to a user
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UnsupportedModelError(
            f"torch.export cannot trace the graph: {lines[0][:200]}",
            where=program.file.path.name,
            hint="was it exported with dynamic batch and sequence sizes?",
        ) from error
    module = bind(exported, constants, model.owners, {})
    module.graph.eliminate_dead_code()
    _share(module.graph)
    check_rows(module.graph)
    check_tokens_apart(module.graph)
    return module


def _share(graph: fx.Graph) -> None:
    """Compute the same call once: exporters repeat cosines and sines for every layer."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is torch.ops.sitsc.attention.default:
            continue
        key = (node.target, repr((node.args, dict(node.kwargs))))
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def trace_onnx(checkpoint: Checkpoint, dtype: torch.dtype) -> fx.GraphModule:
    """The graph of a checkpoint that is an ONNX file, computed in `dtype`. Raises SitscError."""
    program: Program = checkpoint.program
    module = trace_program(program, half_dtype(program, dtype))
    logits: Any = module.graph.output_node().args[0]
    check_vocabulary(int(logits.meta["val"].shape[-1]), checkpoint.config)
    return module


def num_positions(graph: fx.Graph) -> int:
    """Positions that the smallest table looked up by them holds; 0 without one."""
    specs = {node: node.meta.get("weight") for node in graph.find_nodes(op="placeholder")}
    constants = {
        node: materialise(spec, _no_rows)
        for node, spec in specs.items()
        if spec is not None and spec.role == "constant"
    }
    values, found = TokenValues(graph, STEP_INPUTS, constants), [0]
    for node in graph.nodes:
        if is_call(node, "embedding") and not _reads_tokens(node.args[1]):
            rows, first = int(node.args[0].meta["val"].shape[0]), 0
            if node.args[1] in values.known:  # some tables begin with rows of no position
                first = max(0, int(values.compute(node.args[1], 1).flatten()[0]))
            found.append(rows - first)
    return min(found[1:], default=0)


def _no_rows(name: str, start: int, stop: int) -> Tensor:
    raise KeyError(f"{name}[{start}:{stop}]")  # constants are in the graph


def _reads_tokens(node: fx.Node) -> bool:
    while node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.name == "token_ids"


def _export(model: OnnxModule) -> Any:
    tokens, rows = torch.export.Dim("tokens", min=1), torch.export.Dim("rows", min=1)
    ids = torch.zeros(24, dtype=torch.long, device="meta")
    wanted = torch.zeros(7, dtype=torch.long, device="meta")
    shapes = {"token_ids": {0: tokens}, "position_ids": {0: tokens}, "logit_rows": {0: rows}}
    with torch.no_grad(), quiet(logging.CRITICAL):
        program = torch.export.export(
            Step(model), (ids, ids.clone(), wanted), strict=False, dynamic_shapes=shapes
        )
        return decomposed(program)


def _lift(exported: Any, values: dict[str, Tensor]) -> None:
    """Recognise positions and attention in an exported graph; drop what nothing reads then."""
    graph: fx.Graph = exported.graph
    drop_assertions(graph)
    targets = {s.arg.name: s.target for s in exported.graph_signature.input_specs}
    constants = {
        node: values[targets[node.name].removeprefix("model.")]
        for node in graph.find_nodes(op="placeholder")
        if str(targets[node.name]).removeprefix("model.") in values
    }
    use_positions(graph, TokenValues(graph, STEP_INPUTS, constants))
    if not replace_attention(graph, TokenValues(graph, STEP_INPUTS, constants)):
        raise UnsupportedModelError(
            "the graph has no attention", hint="only decoders are imported from ONNX"
        )
    graph.eliminate_dead_code()
    for node in graph.find_nodes(op="placeholder"):
        if not node.users and node.name not in STEP_INPUTS:
            graph.erase_node(node)
