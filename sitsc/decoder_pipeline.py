"""The pipeline of decoders in memory: module → graph with pages → check → plan → code → artifact.

Before any code is made, the paged graph is executed with the module's own weights, in one step and
in two, and compared with the module: whatever the compiler misunderstood stops here.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from sitsc import lowering
from sitsc.codegen import cpu
from sitsc.core import artifact as files
from sitsc.core.artifact import Artifact, ArtifactWriter
from sitsc.core.errors import NumericsError, OptionError, UnsupportedModelError
from sitsc.core.interpret import relative_error, run_graph, run_in_two, step_inputs
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Numerics, Tokens
from sitsc.core.reference import write_reference
from sitsc.core.weights import ReadRows
from sitsc.frontend.decoder import TracedDecoder, logits_of, trace_decoder
from sitsc.frontend.module import evaluated
from sitsc.passes import CPU_INT8, MODULE
from sitsc.passes.base import PassContext
from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.even_rows import EvenRows
from sitsc.passes.page_attention import PageAttention
from sitsc.passes.planner import ModelFacts
from sitsc.passes.runner import run_passes
from sitsc.plain_pipeline import Progress, check_plain_options, main_dtype, manifest, pack

_TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2}
_CHECKED_TOKENS = 21


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What generation needs besides logits: a tokenizer.json, and the tokens that end a text."""

    tokenizer: Path | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Reader:
    read: ReadRows


def compile_decoder(
    module: nn.Module,
    example: Tensor | None,
    vocabulary: Vocabulary,
    out: Path,
    options: CompileOptions,
    progress: Progress,
    dump: Path | None = None,
) -> Artifact:
    """Compile a decoder for the engine. Raises SitscError; leaves nothing half done."""
    data = check_plain_options(replace(options, weights="none"))
    with ArtifactWriter(out) as writer:
        _copy_tokenizer(vocabulary, writer)
        progress("trace", 0.0)
        traced = trace_decoder(module, example, options.max_context)
        graph = traced.module.graph
        dtype = _dtype(graph, options)
        kv_dtype = dtype if options.kv_dtype == "auto" else options.kv_dtype
        context = PassContext(dtype, options.weights, kv_dtype, options.page_size, options.target)
        progress("check", 0.0)
        check_steps(module, traced, context)
        progress("passes", 0.0)
        passes = (*CPU_INT8, EvenRows()) if options.weights == "int8" else MODULE
        run_passes(traced.module, passes, context, dump=dump)
        changing = tuple(p.name for p in passes if not p.preserves_numerics)
        numerics = Numerics(dtype, options.weights, kv_dtype, "float32", True, "any step", changing)
        facts = _facts(module, traced, vocabulary)
        plan, _ = lowering.make_plan(graph, facts, options, numerics, data)
        progress("codegen", 0.0)
        with files.disk_errors(writer.out):
            cpu.generate(graph, writer.root, lambda share: progress("codegen", share))
            write_reference(graph, writer.root)
        pack(plan, traced.read, writer, progress)
        return writer.finish(plan, manifest(plan))


def _dtype(graph: fx.Graph, options: CompileOptions) -> str:
    """The dtype of the weights, which a decoder computes in."""
    found = main_dtype(graph)
    if found not in _TOLERANCE:
        raise UnsupportedModelError(
            f"the weights are {found}; a decoder computes in float32 or bfloat16",
            hint="module.to(torch.bfloat16) first",
        )
    if options.dtype not in ("auto", found):
        raise OptionError(
            f"dtype={options.dtype!r}, but the weights are {found}", hint="convert the module"
        )
    return found


def check_steps(module: nn.Module, traced: TracedDecoder, context: PassContext) -> None:
    """Execute the paged graph against the module. Raises NumericsError where they differ."""
    count = min(_CHECKED_TOKENS, traced.max_context)
    ids = [(7 * i * i + 3 * i + 1) % traced.vocab_size for i in range(count)]
    with evaluated(module), torch.no_grad():
        wanted = logits_of(module(torch.tensor([ids])))[0].float()
    graph = copy.deepcopy(traced.module.graph)
    plain: Any = (Canonicalise(), PageAttention())
    run_passes(fx.GraphModule(nn.Module(), graph), plain, replace(context, kv_dtype=context.dtype))
    reader = _Reader(traced.read)
    inputs = step_inputs(graph, ids, context.page_tokens)
    whole = run_graph(graph, reader, inputs)
    parts = [whole] if count < 2 else [whole, run_in_two(graph, reader, inputs, count * 2 // 3)]
    for name, found in zip(("one step", "two steps"), parts, strict=False):
        error = relative_error(found, wanted)
        if not error <= _TOLERANCE[context.dtype]:
            raise NumericsError(
                f"paged attention in {name} differs from the module: relative error {error:.3g}",
                where=type(module).__name__,
                hint="tokens may meet in attention alone, and positions count from arange(tokens)"
                " or table[:tokens]",
            )


def _facts(module: nn.Module, traced: TracedDecoder, vocabulary: Vocabulary) -> ModelFacts:
    tokens = Tokens(
        vocab_size=traced.vocab_size,
        logits_width=traced.logits_width,
        bos_token_id=None,
        add_bos=False,
        eos_token_ids=tuple(sorted(vocabulary.eos_token_ids)),
        max_context=traced.max_context,
    )
    return ModelFacts(type(module).__name__, "module", {"vocab_size": traced.vocab_size}, tokens)


def _copy_tokenizer(vocabulary: Vocabulary, writer: ArtifactWriter) -> None:
    if vocabulary.tokenizer is None:
        return
    try:
        text = vocabulary.tokenizer.read_bytes()
    except OSError as error:
        raise OptionError(
            f"the tokenizer cannot be read: {error}", hint="a tokenizer.json"
        ) from None
    writer.path(files.TOKENIZER).write_bytes(text)
