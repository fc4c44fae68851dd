"""A module of one's own as a decoder: token ids in, logits out, attention over the tokens before.

In: a module that maps ids [1, tokens] to logits [1, tokens, vocabulary]. Out: a graph like that of
a checkpoint: step inputs token_ids, position_ids and logit_rows, attention as sitsc::attention.
Says in one line what stands against it.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode

from sitsc.core.errors import OptionError, UnsupportedModelError
from sitsc.core.weights import ReadRows
from sitsc.frontend.apart import check_tokens_apart
from sitsc.frontend.bind import drop_assertions
from sitsc.frontend.causal import Causal, place_of
from sitsc.frontend.module import (
    check_outputs,
    check_weights,
    describe_weights,
    export,
    read_weights,
)
from sitsc.frontend.positions import place_positions

_PREFIX = "model."
_EXAMPLE_TOKENS = 13  # unlike any size of a model, so that no size is taken for it
_ROWS = 3
_USUAL_CONTEXT, _LONGEST_CONTEXT = 2048, 8192


@dataclass(frozen=True, slots=True)
class TracedDecoder:
    """The graph of a decoder, its reader of weights, its vocabulary and its longest context."""

    module: fx.GraphModule
    read: ReadRows
    vocab_size: int
    logits_width: int
    max_context: int


class _Step(nn.Module):
    """[tokens] ids in, [rows, vocabulary] float32 logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, token_ids: Tensor, logit_rows: Tensor) -> Tensor:
        return logits_of(self.model(token_ids[None]))[:, logit_rows].float()[0]


def logits_of(result: Any) -> Tensor:
    """The logits [1, tokens, vocabulary] of what a forward returned. Raises UnsupportedModelError.

    A tuple's first item, a dictionary's or an object's `logits`, or the tensor itself.
    """
    if isinstance(result, tuple | list) and result:
        result = result[0]
    elif not isinstance(result, Tensor):
        found = result.get("logits") if isinstance(result, dict) else None
        result = getattr(result, "logits", None) if found is None else found
    if not isinstance(result, Tensor) or result.dim() != 3:
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise UnsupportedModelError(
            f"a decoder returns logits [1, tokens, vocabulary], this one {shape}",
            hint="return the logits of every token",
        )
    if isinstance(result.shape[1], int) and result.shape[1] == 1:
        raise UnsupportedModelError(
            "the decoder returns logits of one token only", hint="return those of every token"
        )
    return result


def trace_decoder(module: nn.Module, example: Tensor | None, max_context: int) -> TracedDecoder:
    """The graph of `module`; `max_context` 0 means as long as it can, 8192 at most.

    Raises UnsupportedModelError, or OptionError for a context that the module lacks.
    """
    check_weights(module)
    _check_signature(module)
    free = {0: torch.export.Dim.DYNAMIC}
    shapes = {"token_ids": free, "logit_rows": free}
    rows = torch.zeros(_ROWS, dtype=torch.long)
    name = type(module).__name__
    program = export(_Step(module), (_example_ids(example), rows), {}, shapes, name)
    weights = read_weights(program)
    graph: fx.Graph = program.graph
    check_outputs(program, _PREFIX)
    describe_weights(graph, program, weights, _PREFIX)
    token_ids = _describe_inputs(graph)
    drop_assertions(graph)
    output: Any = graph.output_node()
    output.args = (output.args[0][0],)
    width = _logits_width(graph)
    [symbol] = token_ids.meta["val"].shape
    causal = Causal(graph, weights, symbol)
    placed = place_positions(graph, token_ids, causal.evaluate, _bound(program, symbol))
    context = _context(max_context, placed.most_tokens)
    causal.rewrite(context)
    placed.rewrite()
    check_attention(graph, symbol)
    check_tokens_apart(graph)
    vocabulary = min([width, *_tables(graph, token_ids)])
    return TracedDecoder(
        fx.GraphModule(nn.Module(), graph),
        lambda name, start, stop: weights[name][start:stop],
        vocabulary,
        width,
        context,
    )


def _check_signature(module: nn.Module) -> None:
    """Raise UnsupportedModelError when the forward wants more than token ids."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(module.forward).parameters.values())
    wanted = [p.name for p in parameters[1:] if p.kind in kinds and p.default is p.empty]
    wanted += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if wanted or not parameters:
        names = ", ".join(p.name for p in parameters)
        raise UnsupportedModelError(
            f"the forward takes ({names}), a decoder takes token ids alone",
            hint="give the others a default, or wrap the module",
        )


def _example_ids(example: Tensor | None) -> Tensor:
    """Token ids [tokens] to trace with."""
    if example is None:
        return torch.zeros(_EXAMPLE_TOKENS, dtype=torch.long)
    if example.dtype != torch.long or example.dim() != 2 or example.shape[0] != 1:
        raise UnsupportedModelError(
            f"a decoder takes int64 token ids [1, tokens], not {example.dtype} "
            f"{list(example.shape)}",
            where="example_inputs",
            hint="leave example_inputs out, or give torch.zeros(1, 13, dtype=torch.long)",
        )
    return example[0].cpu()


def _describe_inputs(graph: fx.Graph) -> fx.Node:
    """Name the step inputs and add the positions; the node of the token ids."""
    found = {}
    for name, size in (("token_ids", "tokens"), ("logit_rows", "rows")):
        [node] = graph.find_nodes(op="placeholder", target=name)
        node.meta["input"], node.meta["dims"] = name, (size,)
        found[name] = node
    token_ids = found["token_ids"]
    with graph.inserting_after(found["logit_rows"]):
        positions = graph.placeholder("position_ids")
    positions.meta |= {"input": "position_ids", "dims": ("tokens",)}
    mode = detect_fake_mode([token_ids.meta["val"]])
    assert mode is not None
    with mode:
        positions.meta["val"] = torch.empty_like(token_ids.meta["val"])
    return token_ids


def _logits_width(graph: fx.Graph) -> int:
    width = graph.output_node().args[0].meta["val"].shape[-1]  # pyright: ignore
    if not isinstance(width, int):
        raise UnsupportedModelError("the vocabulary of the logits has no fixed size")
    return width


def _bound(program: Any, symbol: Any) -> int:
    """The most tokens that the forward itself allows, 0 without a bound."""
    bounds = program.range_constraints.get(symbol.node.expr)
    return int(bounds.upper) if bounds is not None and str(bounds.upper).isdigit() else 0


def _context(wanted: int, most: int) -> int:
    if most and wanted > most:
        raise OptionError(
            f"max_context={wanted} is beyond the module's {most} positions",
            hint=f"give {most} at most",
        )
    return wanted or min(most or _USUAL_CONTEXT, _LONGEST_CONTEXT)


def _tables(graph: fx.Graph, token_ids: fx.Node) -> list[int]:
    """Rows of the tables that token ids index: no id may be beyond them."""
    seen, found = {token_ids}, []
    for node in graph.nodes:
        reads = [n for n in node.all_input_nodes if n in seen]
        name = str(node.target)
        if reads and name.startswith("aten.embedding"):
            found.append(int(node.args[0].meta["val"].shape[0]))
        elif reads and any(word in name for word in ("unsqueeze", "view", "reshape", "_to_copy")):
            seen.add(node)
    return found


def check_attention(graph: fx.Graph, symbol: Any) -> None:
    """Raise UnsupportedModelError for values that hold every token against every other."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not node.users:
            continue
        if sum(str(symbol) in str(size) for size in value.shape) > 1:
            raise UnsupportedModelError(
                "attention written by hand: all tokens against all others",
                where=place_of(node),
                hint="call torch.nn.functional.scaled_dot_product_attention",
            )
