"""The CUDA planner: one regime a bucket, one arena for all, launches as a document.

In: the final graph, the model's facts, options, target and a provider of kernels. Out: a `Plan`.
Step inputs keep one place through all regimes; the values inside a step share the rest of the
arena.
"""

from dataclasses import replace
from typing import Any

from torch import fx

from sitsc.core.errors import MemoryPlanError, OptionError
from sitsc.core.hardware import TargetData
from sitsc.core.kernels import KernelInfo, KernelProvider
from sitsc.core.options import CompileOptions
from sitsc.core.plan import (
    PLACE_GROUP,
    SCHEMA,
    ArenaBuffer,
    Argument,
    Launch,
    LaunchGroup,
    LayerClass,
    Memory,
    Model,
    Numerics,
    Parallel,
    Plan,
    Rank,
    Regime,
    Schedule,
    Tier,
)
from sitsc.core.printer import symbol_names
from sitsc.core.weights import DTYPES
from sitsc.passes.cost import Sizes
from sitsc.passes.cuda_schedule import CudaScheduler, Scheduled
from sitsc.passes.layers import layer_classes
from sitsc.passes.memory import Arena, aligned, plan_arena
from sitsc.passes.planner import ModelFacts, predictions, weights_of
from sitsc.passes.schedule import StepSizes, kernel_rows, kv_groups

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
PREFILL_BUCKETS = (128, 512, 2048, 8192)
CUDA_LAYOUT = "layer, page, k: [head, token, dim], v: [head, token, dim]"
_CONTEXT = 1024
_SAMPLED, _BEST, _INDEX, _ARRIVED = "sampled_ids", "best", "best_index", "argmax_counters"
_PARTS = 32
_BLOCK = 256
_SAMPLING = {"decode": ("argmax", "advance"), "prefill": ("argmax",)}
_BUFFERS = {
    "best_ptr": (_BEST, "float32"),
    "index_ptr": (_INDEX, "int32"),
    "counter_ptr": (_ARRIVED, "int32"),
    "ids_ptr": (_SAMPLED, "int64"),
    "token_ids_ptr": ("token_ids", "int64"),
    "position_ids_ptr": ("position_ids", "int64"),
    "context_lens_ptr": ("context_lens", "int32"),
    "token_sources_ptr": ("token_sources", "int32"),
    "token_places_ptr": ("token_places", "int32"),
}


def cuda_buckets(options: CompileOptions, context: int) -> list[StepSizes]:
    """Decode buckets up to the largest batch, prefill buckets up to the chunk."""
    chunk = min(options.prefill_chunk_tokens, context)
    decode = sorted({min(b, options.max_batch) for b in DECODE_BUCKETS})
    # The largest step: a whole chunk beside all other sequences.
    prefill = sorted({min(t, chunk) for t in PREFILL_BUCKETS} | {chunk + options.max_batch})
    typical = min(_CONTEXT, context - 1)
    found = [StepSizes("decode", b, b, typical) for b in decode]
    return found + [StepSizes("prefill", t, min(t, options.max_batch), 0) for t in prefill]


def make_cuda_plan(
    graph: fx.Graph,
    facts: ModelFacts,
    options: CompileOptions,
    numerics: Numerics,
    data: TargetData,
    provider: KernelProvider,
) -> tuple[Plan, dict[str, KernelInfo]]:
    """The plan of one GPU and the kernel instances that it launches. Raises MemoryPlanError."""
    context = facts.tokens.max_context
    steps = cuda_buckets(options, context)
    classes, target = layer_classes(graph), data.target
    made: list[Scheduled] = []
    for step in steps:
        scheduler = CudaScheduler(
            graph, step, classes, target, provider, options.page_size, kv_pages(options, context)
        )
        made.append(scheduler.run())
    keys = {key: info for one in made for key, info in one.keys.items()}
    inputs = _inputs(options, context)
    arena, places = _arena(inputs, steps, made)
    found = []
    for step, one, offsets in zip(steps, made, places, strict=True):
        groups = [
            _step_group(PLACE_GROUP, ("place",), one, offsets, step, provider, keys),
            *[_placed(group, offsets) for group in one.groups],
            _step_group("sample", _SAMPLING[step.kind], one, offsets, step, provider, keys),
        ]
        found.append(_regime(graph, step, groups, classes, data, options))
    plan = Plan(
        schema=SCHEMA,
        model=Model(
            facts.architecture, facts.model_type, facts.dimensions, classes, weights_of(graph)
        ),
        tokens=facts.tokens,
        target=target,
        parallel=Parallel(1, 1, 1, 1, 1, min(options.prefill_chunk_tokens, context), ()),
        regimes=tuple(found),
        packages=(),
        ranks=(Rank(0, 0, 0),),
        kv=kv_groups(graph, options.page_size, CUDA_LAYOUT),
        memory=_memory(graph, arena, options, data, context),
        schedule=_schedule(steps, options, context),
        numerics=numerics,
        predictions={},
    )
    return replace(plan, predictions=predictions(plan.regimes, plan.memory, data)), keys


def _regime(
    graph: fx.Graph,
    step: StepSizes,
    groups: list[LaunchGroup],
    classes: tuple[LayerClass, ...],
    data: TargetData,
    options: CompileOptions,
) -> Regime:
    values = step.values(options.page_size)
    rows = kernel_rows(graph, Sizes(symbol_names(graph), values), classes, data.target)
    time = sum(
        g.predicted_us * max(1, len(group.layers)) for group in groups for g in group.launches
    )
    return Regime(f"{step.kind}_{step.tokens}", step.kind, values, tuple(groups), rows, time)


# --- arena ------------------------------------------------------------------------------------


def _inputs(options: CompileOptions, context: int) -> list[ArenaBuffer]:
    """Step inputs and the sampled ids, at their largest; they live through every step."""
    tokens = min(options.prefill_chunk_tokens, context) + options.max_batch
    batch, width = options.max_batch, -(-context // options.page_size)
    shapes = {
        "token_ids": ("int64", (tokens,)),
        "position_ids": ("int64", (tokens,)),
        "logit_rows": ("int64", (batch,)),
        "block_table": ("int32", (batch, width)),
        "query_start": ("int32", (batch + 1,)),
        "context_lens": ("int32", (batch,)),
        "token_sources": ("int32", (batch,)),
        "token_places": ("int32", (batch,)),
        _SAMPLED: ("int64", (batch,)),
        _BEST: ("float32", (batch, _PARTS)),
        _INDEX: ("int32", (batch, _PARTS)),
        _ARRIVED: ("int32", (batch,)),
    }
    buffers = []
    for name, (dtype, shape) in shapes.items():
        count = 1
        for size in shape:
            count *= size
        nbytes = count * DTYPES[dtype].itemsize
        buffers.append(ArenaBuffer(name, dtype, shape, 0, nbytes, 0, 0))
    return buffers


def _arena(
    inputs: list[ArenaBuffer], steps: list[StepSizes], made: list[Scheduled]
) -> tuple[Arena, list[dict[str, ArenaBuffer]]]:
    """Inputs first; then the buffers of each regime, all from the same place on."""
    base = plan_arena(inputs)
    scratch = {b.name: b for one in made for b in one.buffers if b.name in ("partials", "counters")}
    for one in made:
        for buffer in one.buffers:
            if buffer.name in scratch and buffer.bytes > scratch[buffer.name].bytes:
                scratch[buffer.name] = buffer
    kept = plan_arena([replace(b, first=0, last=0) for b in scratch.values()])
    start = base.bytes
    shared = [replace(b, offset=b.offset + start) for b in kept.buffers]
    start += kept.bytes
    buffers, places, end = [*base.buffers, *shared], [], start
    for step, one in zip(steps, made, strict=True):
        inside = plan_arena([b for b in one.buffers if b.name not in scratch])
        moved = [replace(b, offset=b.offset + start) for b in inside.buffers]
        places.append({b.name: b for b in [*base.buffers, *shared, *moved]})
        prefix = f"{step.kind}_{step.tokens}"
        buffers += [replace(b, name=f"{prefix}/{b.name}") for b in moved]
        end = max(end, start + inside.bytes)
    return Arena(tuple(buffers), end), places


def _placed(group: LaunchGroup, places: dict[str, ArenaBuffer]) -> LaunchGroup:
    """Arena arguments as offsets from the start of the arena."""

    def place(argument: Argument) -> Argument:
        if argument.source != "arena":
            return argument
        return replace(argument, offset=argument.offset + places[argument.buffer].offset)

    launches = tuple(
        replace(launch, arguments=tuple(place(a) for a in launch.arguments))
        for launch in group.launches
    )
    return replace(group, launches=launches)


def _step_group(
    name: str,
    templates: tuple[str, ...],
    one: Scheduled,
    places: dict[str, ArenaBuffer],
    step: StepSizes,
    provider: KernelProvider,
    keys: dict[str, KernelInfo],
) -> LaunchGroup:
    """Launches before and after the model: tokens put in place, tokens sampled from logits."""
    assert one.logits is not None
    width = int(one.logits.shape[1])
    shapes: dict[str, dict[str, Any]] = {
        "place": {"max_sequences": max(_BLOCK, step.sequences)},
        "argmax": {"vocabulary": width, "parts": _PARTS, "count": "rows"},
        "advance": {"max_sequences": max(_BLOCK, step.sequences)},
    }
    bound = {"logits_ptr": replace(one.logits, name="logits_ptr")}
    bound |= {name: Argument(name, "arena", b, d, ()) for name, (b, d) in _BUFFERS.items()}
    bound["num_sequences"] = Argument("num_sequences", "size", "sequences", "i32", ())
    launches = []
    for template in templates:
        info = provider.make(template, **shapes[template])
        keys[info.key] = info
        launches.append(
            Launch(
                kind="kernel",
                kernel=info.key,
                template=info.template,
                tile=info.tile,
                grid=info.grid,
                arguments=tuple(bound[argument] for argument, _ in info.arguments),
                outputs=(),
                stream=0,
                dependent=info.dependent,
                bytes=4 * width * step.sequences if template == "argmax" else 0,
                flops=0,
                predicted_us=0.0 if template == "place" else 2.0,
            )
        )
    return _placed(LaunchGroup(name, (), tuple(launches)), places)


# --- memory and schedule ------------------------------------------------------------------------


def kv_pages(options: CompileOptions, context: int) -> int:
    """Pages of the KV pool. Raises OptionError when one sequence would not fit."""
    wanted = options.kv_tokens or max(2 * context, 64 * options.max_batch)
    if wanted < context:
        raise OptionError(
            f"--kv-tokens {wanted} cannot hold one sequence of {context} tokens",
            hint=f"--kv-tokens {context} or a smaller --max-context",
        )
    return -(-wanted // options.page_size)


def _memory(
    graph: fx.Graph, arena: Arena, options: CompileOptions, data: TargetData, context: int
) -> Memory:
    groups = kv_groups(graph, options.page_size, "")
    pages = kv_pages(options, context)
    weights = sum(aligned(spec.nbytes) for spec in weights_of(graph))
    kv_bytes = sum(pages * group.page_bytes for group in groups)
    graphs = len(DECODE_BUCKETS) * (24 << 20)
    total = weights + arena.bytes + kv_bytes + graphs
    if data.target.memory_bytes and total > data.target.memory_bytes:
        raise MemoryPlanError(
            f"needs {total} bytes (weights {weights}, KV {kv_bytes}, arena {arena.bytes}), "
            f"{data.target.name} has {data.target.memory_bytes}",
            hint="a smaller --kv-tokens, --max-batch or --prefill-chunk-tokens",
        )
    return Memory(
        weights_bytes=weights,
        arena_bytes=arena.bytes,
        arena=arena.buffers,
        kv_pages=pages,
        kv_bytes=kv_bytes,
        package_bytes=0,
        graph_bytes=graphs,
        slack_bytes=0,
        total_bytes=total,
        tiers=(
            Tier("weights", "device", "read through pinned memory into one allocation"),
            Tier("kv", "device", "one allocation"),
            Tier("arena", "device", "one allocation"),
        ),
    )


def _schedule(steps: list[StepSizes], options: CompileOptions, context: int) -> Schedule:
    chunk = min(options.prefill_chunk_tokens, context)
    return Schedule(
        decode_buckets=tuple(s.tokens for s in steps if s.kind == "decode"),
        prefill_buckets=tuple(s.tokens for s in steps if s.kind == "prefill"),
        max_batch=options.max_batch,
        max_step_tokens=chunk + options.max_batch,
        prefill_chunk_tokens=chunk,
        num_streams=1,
    )
