"""The CUDA planner: one regime a bucket, one arena for all, launches as a document.

In: the final graph, the model's facts, options, target and a provider of kernels. Out: a `Plan`.
Step inputs keep one place through all regimes; the values inside a step share the rest of the
arena.
"""

from dataclasses import replace

from torch import fx

from sitsc.core.calibration import calibration_for
from sitsc.core.errors import OptionError
from sitsc.core.hardware import TargetData
from sitsc.core.kernels import KernelInfo, KernelProvider
from sitsc.core.memory_changes import check_planned
from sitsc.core.options import CompileOptions
from sitsc.core.plan import (
    DRAW_GROUP,
    SCHEMA,
    ArenaBuffer,
    Argument,
    LaunchGroup,
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
from sitsc.passes.collectives import topology_of
from sitsc.passes.cost import Sizes
from sitsc.passes.cuda_collectives import crossing_buffers, first_sends
from sitsc.passes.cuda_launch import SCRATCH
from sitsc.passes.cuda_schedule import CudaScheduler, Scheduled
from sitsc.passes.cuda_step import StepLaunches, mail_buffers, step_buffers
from sitsc.passes.launch_names import computed_by
from sitsc.passes.launch_time import Clock, step_us, timed, with_shares
from sitsc.passes.layers import layer_classes
from sitsc.passes.memory import Arena, aligned, plan_arena
from sitsc.passes.op_time import device_of
from sitsc.passes.planner import ModelFacts, predictions, weights_of
from sitsc.passes.schedule import StepSizes, kernel_rows, kv_groups

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_BUCKET_STEP = 128  # from one decode bucket to the next, above those
PREFILL_BUCKETS = (128, 512, 2048, 8192)
CUDA_LAYOUT = "layer, page, k: [head, token, dim], v: [head, token, dim]"
# What a graph takes of the device: an H200 gave 64 MiB to all twelve, for 16 layers as for 32.
_GRAPH_BYTES = 6 << 20
_CONTEXT = 1024


def cuda_buckets(options: CompileOptions, context: int) -> list[StepSizes]:
    """Decode buckets up to the largest batch, prefill buckets up to the chunk."""
    chunk, most = min(options.prefill_chunk_tokens, context), options.max_batch
    larger = range(DECODE_BUCKETS[-1] + _BUCKET_STEP, most + _BUCKET_STEP, _BUCKET_STEP)
    decode = sorted({min(b, most) for b in (*DECODE_BUCKETS, *larger)})
    # The largest step: a whole chunk beside all other sequences.
    prefill = sorted({min(t, chunk) for t in PREFILL_BUCKETS} | {chunk + most})
    typical = min(_CONTEXT, context - 1)
    found = [StepSizes("decode", b, b, typical) for b in decode]
    return found + [StepSizes("prefill", t, min(t, most), 0) for t in prefill]


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
    classes, calibration = layer_classes(graph), calibration_for(data)
    ceilings = with_shares(data.target.ceilings, calibration)
    target = replace(data.target, ceilings=ceilings)
    where = topology_of(data, options.tp) if options.tp > 1 else None
    clock = Clock(device_of(data, calibration), options.tp, where)
    made: list[Scheduled] = []
    for step in steps:
        scheduler = CudaScheduler(
            graph,
            step,
            classes,
            target,
            provider,
            options.page_size,
            kv_pages(options, context),
            options.tp,
        )
        made.append(scheduler.run())
    keys = {key: info for one in made for key, info in one.keys.items()}
    most = min(options.prefill_chunk_tokens, context) + options.max_batch
    inputs = step_buffers(options, context, facts.tokens)
    inputs += crossing_buffers(graph, -(-most // 8) * 8)
    sends = first_sends(graph)
    inputs += mail_buffers(options, sends, made[0].logits is not None)
    extra = StepLaunches(facts.tokens, provider, keys, options, clock, sends)
    arena, places = _arena(inputs, steps, made)
    found = []
    for step, one, offsets in zip(steps, made, places, strict=True):
        prices = Sizes(symbol_names(graph), step.priced().values(options.page_size))
        launched, times = timed(one.groups, one.works, prices, clock)
        groups = [
            _placed(extra.place(one, step), offsets),
            *[_placed(group, offsets) for group in launched],
        ]
        if one.logits is not None:
            groups += [_placed(group, offsets) for group in extra.sample(one, step)]
        by = computed_by(graph, one.groups, one.works, classes)
        rows = kernel_rows(graph, prices, classes, target, times, by)
        time = step_us(groups, step.kind, clock.device)
        name, values = f"{step.kind}_{step.tokens}", step.values(options.page_size)
        found.append(Regime(name, step.kind, values, tuple(groups), rows, time))
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
        memory=_memory(graph, arena, _graph_bytes(found), options, context),
        schedule=_schedule(steps, options, context),
        numerics=numerics,
        predictions={},
    )
    cut = replace(plan.parallel, tp=options.tp, pp=options.pp)
    check_planned(replace(plan, parallel=cut))
    limits = replace(data, target=target)
    return replace(plan, predictions=predictions(plan.regimes, plan.memory, limits)), keys


# --- arena ------------------------------------------------------------------------------------


def _arena(
    inputs: list[ArenaBuffer], steps: list[StepSizes], made: list[Scheduled]
) -> tuple[Arena, list[dict[str, ArenaBuffer]]]:
    """Inputs first; then the buffers of each regime, all from the same place on."""
    base = plan_arena(inputs)
    scratch = {b.name: b for one in made for b in one.buffers if b.name in SCRATCH}
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


def _graph_bytes(regimes: list[Regime]) -> int:
    """What the graphs of all decode regimes take: one each, and another where a row can draw."""
    decode = [regime for regime in regimes if regime.kind == "decode"]
    drawing = [r for r in decode if any(group.name == DRAW_GROUP for group in r.groups)]
    return (len(decode) + len(drawing)) * _GRAPH_BYTES


def _memory(
    graph: fx.Graph, arena: Arena, graphs: int, options: CompileOptions, context: int
) -> Memory:
    groups = kv_groups(graph, options.page_size, "")
    pages = kv_pages(options, context)
    weights = sum(aligned(spec.nbytes) for spec in weights_of(graph))
    kv_bytes = sum(pages * group.page_bytes for group in groups)
    total = weights + arena.bytes + kv_bytes + graphs
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
