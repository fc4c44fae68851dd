"""From a configuration to a plan: choosing dtypes, tracing, running the passes, planning.

What `pipeline.plan_checkpoint` calls; imports transformers and the passes, so it is imported late.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from sitsc.codegen import cpu
from sitsc.core.errors import CompileError, OptionError
from sitsc.core.hardware import CudaLimits, TargetData, load_target
from sitsc.core.kernels import KernelProvider
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Numerics, Plan, Tokens
from sitsc.core.tiles import TileTable
from sitsc.core.tuning import SCHEMA, TuneSet, contexts
from sitsc.core.weights import DTYPES
from sitsc.frontend.checkpoint import Checkpoint
from sitsc.frontend.experts_lint import num_experts
from sitsc.frontend.head_widths import check_head_widths
from sitsc.frontend.longrope import longrope_switch
from sitsc.frontend.nested import place_weights
from sitsc.frontend.onnx_checkpoint import check_context
from sitsc.frontend.onnx_trace import num_positions, trace_onnx
from sitsc.frontend.shrink import tiny_config
from sitsc.frontend.trace import trace
from sitsc.passes import CPU, CPU_INT8, CUDA, CUDA_WIDE
from sitsc.passes.base import Pass, PassContext
from sitsc.passes.cuda_chain import Chain, schedule_chain
from sitsc.passes.cuda_planner import make_cuda_plan
from sitsc.passes.fxutil import arguments, is_op, tensor
from sitsc.passes.layers import layer_classes
from sitsc.passes.planner import ModelFacts, Workspace, weights_of
from sitsc.passes.planner import make_plan as plan_graph
from sitsc.passes.runner import run_passes
from sitsc.passes.schedule import StepSizes, kv_groups

__all__ = [
    "build_candidates",
    "check_checkpoint",
    "check_passes",
    "fit_context",
    "make_plan",
    "model_facts",
    "numerics_of",
    "pass_context",
    "pass_tuple",
    "resolve_dtypes",
    "run",
    "trace",
    "trace_checkpoint",
]

_DEFAULT_CONTEXT = 8192
_UNKNOWN_CONTEXT = 2048  # of a model that says nothing of its positions
BUCKET = "a decode bucket"
Generate = Callable[[Path, Callable[[float], None]], None]


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes that "auto" came to."""

    compute: str
    kv: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype to trace in."""
        return DTYPES[self.compute]


def resolve_dtypes(config: dict[str, Any], options: CompileOptions) -> Dtypes:
    """Auto means float32 for a float32 checkpoint, else bfloat16; the KV cache follows."""
    stored = config.get("dtype", config.get("torch_dtype"))
    automatic = "float32" if stored == "float32" else "bfloat16"
    compute = automatic if options.dtype == "auto" else options.dtype
    return Dtypes(compute, compute if options.kv_dtype == "auto" else options.kv_dtype)


def model_facts(checkpoint: Checkpoint, options: CompileOptions) -> ModelFacts:
    """Dimensions, vocabulary and limits. Raises OptionError for a context the model lacks.

    UnsupportedModelError for attention that the target has no kernels for.
    """
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    check_head_widths(config, options.target)
    longest = _known_positions(config) or _UNKNOWN_CONTEXT
    if options.max_context > longest and not _by_graph(checkpoint):
        raise OptionError(
            f"--max-context {options.max_context} is beyond the model's {longest} positions",
            hint=f"give {longest} at most",
        )
    longest = min(longest, longrope_switch(config) or longest)  # past it only when asked for
    width = int(config["vocab_size"])
    tokens = Tokens(
        vocab_size=min(width, _vocabulary(tokenizer.tokenizer_json) or width),
        logits_width=width,
        bos_token_id=tokenizer.bos_token_id,
        add_bos=tokenizer.add_bos,
        eos_token_ids=tuple(tokenizer.eos_token_ids),
        max_context=options.max_context or min(longest, _DEFAULT_CONTEXT),
    )
    sizes = {k: v for k, v in config.items() if isinstance(v, int) and not isinstance(v, bool)}
    names = config.get("architectures") or [config.get("model_type", "")]
    return ModelFacts(str(names[0]), str(config.get("model_type")), sizes, tokens)


def _known_positions(config: dict[str, Any]) -> int:
    """The positions that a config speaks of; 0 if it says nothing."""
    return int(config.get("max_position_embeddings") or config.get("n_positions") or 0)


def _by_graph(checkpoint: Checkpoint) -> bool:
    """Whether only an ONNX graph can tell how many positions there are."""
    return checkpoint.program is not None and not _known_positions(checkpoint.config)


def fit_context(
    facts: ModelFacts, checkpoint: Checkpoint, options: CompileOptions, graph: fx.Graph
) -> ModelFacts:
    """The facts, with a context that fits the table of positions of an ONNX graph as traced.

    Raises OptionError for one that does not.
    """
    if checkpoint.program is None:
        return facts
    positions, context = num_positions(graph), facts.tokens.max_context
    if positions and not options.max_context and _by_graph(checkpoint):
        context = min(positions, _DEFAULT_CONTEXT)
    check_context(positions, options, context)
    return replace(facts, tokens=replace(facts.tokens, max_context=context))


def _vocabulary(tokenizer_json: bytes | None) -> int:
    """One more than the largest token id of a tokenizer; 0 without one."""
    if tokenizer_json is None:
        return 0
    value = json.loads(tokenizer_json)
    vocab = value.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in value.get("added_tokens", [])]
    return max(ids, default=-1) + 1


def trace_checkpoint(
    checkpoint: Checkpoint, dtypes: Dtypes, options: CompileOptions, max_context: int
) -> fx.GraphModule:
    """The graph of a checkpoint: of its config, or of the ONNX program that it is."""
    if checkpoint.program is None:
        module = trace(checkpoint.config, dtypes.torch_dtype, max_context)
        if checkpoint.nested is not None:
            place_weights(module.graph, checkpoint.nested)
        return module
    return trace_onnx(checkpoint, dtypes.torch_dtype)


def pass_tuple(options: CompileOptions) -> tuple[Pass, ...]:
    """The passes of the target and the weight format asked for."""
    if load_target(options.target).cuda is not None:
        return CUDA if options.residual == "bfloat16" else CUDA_WIDE
    return CPU_INT8 if options.weights == "int8" else CPU


def pass_context(dtypes: Dtypes, options: CompileOptions) -> PassContext:
    """What passes need to know of the compilation."""
    kind = "cpu" if options.is_cpu else "gpu"
    return PassContext(dtypes.compute, options.weights, dtypes.kv, options.page_size, kind)


def run(
    module: fx.GraphModule, dtypes: Dtypes, options: CompileOptions, dump: Path | None
) -> Numerics:
    """Run the passes of the target in place, and say what that means for precision."""
    passes = pass_tuple(options)
    run_passes(module, passes, pass_context(dtypes, options), dump=dump)
    return numerics_of(passes, dtypes, options)


def numerics_of(passes: tuple[Pass, ...], dtypes: Dtypes, options: CompileOptions) -> Numerics:
    """What these passes mean for precision."""
    return Numerics(
        dtype=dtypes.compute,
        weights=options.weights,
        kv_dtype=dtypes.kv,
        accumulate="float32",
        batch_invariant=True,
        invariant_within="any step" if load_target(options.target).cuda is None else BUCKET,
        changing_passes=tuple(p.name for p in passes if not p.preserves_numerics),
    )


def check_checkpoint(checkpoint: Checkpoint, dtypes: Dtypes, options: CompileOptions) -> None:
    """Check the passes on a small model of the shape of a checkpoint, an ONNX graph as it is."""
    if checkpoint.program is None:
        check_passes(checkpoint.config, dtypes, options)
        return
    module = trace_onnx(checkpoint, dtypes.torch_dtype)
    run_passes(module, pass_tuple(options), pass_context(dtypes, options), check=True)


def check_passes(config: dict[str, Any], dtypes: Dtypes, options: CompileOptions) -> None:
    """Execute a small model of the same shape before and after every pass. Raises NumericsError.

    With experts in float32: a score rounded otherwise may choose another expert.
    """
    if num_experts(config):
        dtypes = Dtypes("float32", "float32")
    module = trace(tiny_config(config), dtypes.torch_dtype)
    run_passes(module, pass_tuple(options), pass_context(dtypes, options), check=True)


def make_plan(
    graph: fx.Graph,
    facts: ModelFacts,
    options: CompileOptions,
    numerics: Numerics,
    data: TargetData,
) -> tuple[Plan, Generate]:
    """The plan of the final graph, and the function that writes its code to a folder."""
    if data.cuda is not None:
        return _cuda_plan(graph, facts, options, numerics, data, data.cuda)
    constants = {cpu.weight_key(spec.name): spec.name for spec in weights_of(graph)}
    workspace = Workspace(_workspace(graph, facts, options), constants)
    plan = plan_graph(graph, facts, options, numerics, data, workspace)
    return plan, lambda folder, progress: cpu.generate(graph, folder, progress)


def _cuda_plan(
    graph: fx.Graph,
    facts: ModelFacts,
    options: CompileOptions,
    numerics: Numerics,
    data: TargetData,
    limits: CudaLimits,
) -> tuple[Plan, Generate]:
    from sitsc.codegen import cuda  # noqa: PLC0415  (Triton: a second to import)

    if (numerics.dtype, numerics.kv_dtype, numerics.weights) != ("bfloat16", "bfloat16", "none"):
        raise OptionError(
            "CUDA targets compute in bfloat16 today", hint="--dtype bfloat16, no --weights"
        )
    provider = cuda.CudaProvider(options.target, limits)
    plan, keys = make_cuda_plan(graph, facts, options, numerics, data, provider)
    return plan, lambda folder, progress: cuda.generate(provider, list(keys), folder, progress)


def build_candidates(
    graph: fx.Graph,
    data: TargetData,
    options: CompileOptions,
    tokens: tuple[int, ...],
    most: int,
    folder: Path,
    progress: Callable[[float], None],
    table: TileTable | None = None,
) -> tuple[TuneSet, list[CompileError]]:
    """Kernels to measure in decode steps of `tokens` sequences. Raises OptionError off GPUs.

    The search begins with the choices of `table`, by default the target's own.
    """
    from sitsc.codegen import tune  # noqa: PLC0415  (the templates, which only GPUs need)

    if data.cuda is None:
        raise OptionError(f"{options.target} has no tile table", hint="name a GPU")
    page, classes, target = options.page_size, layer_classes(graph), data.target
    pages = max(n * (-(-length // page) + 1) for n in tokens for length in contexts(n))

    def schedule(count: int, provider: KernelProvider) -> Chain:
        step = StepSizes("decode", count, count, max(contexts(count)))
        return schedule_chain(graph, step, classes, target, provider, page, pages, options.tp)

    empty = TuneSet(
        schema=SCHEMA,
        target=options.target,
        sm=data.cuda.sm,
        kv=kv_groups(graph, page, ""),
        kv_pages=pages,
        parameters=weights_of(graph),
        subjects=(),
        chains=(),
    )
    limits = data.cuda
    return tune.build(
        schedule, tokens, most, options.target, limits, folder, empty, progress, table
    )


def _workspace(graph: fx.Graph, facts: ModelFacts, options: CompileOptions) -> int:
    """Scratch of the kernels at the largest step."""
    linears = [arguments(n) for n in graph.nodes if is_op(n, "fused_linear")]
    attentions = [arguments(n) for n in graph.nodes if is_op(n, "paged_attention")]
    tokens = min(options.prefill_chunk_tokens, facts.tokens.max_context) + options.max_batch
    experts = max((cpu.moe_bytes(n, tokens) for n in graph.nodes if is_op(n, "moe")), default=0)
    common = cpu.workspace_bytes(
        tokens=tokens,
        max_k=max((int(tensor(a["x"]).shape[-1]) for a in linears), default=64),
        max_n=max((int(a["out_features"]) for a in linears), default=64),
        seqs=options.max_batch,
        q_heads=max((int(tensor(a["q"]).shape[1]) for a in attentions), default=1),
        head_dim=max((int(tensor(a["q"]).shape[2]) for a in attentions), default=64),
        max_context=facts.tokens.max_context,
    )
    return max(common, experts)
