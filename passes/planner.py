"""The planner: the final graph and the choices made become the plan.

In: a graph after its passes, the model's facts, options and target. Out: a `Plan` with every size
in bytes. Reads no weight and no file.
"""

from dataclasses import dataclass, replace

from torch import fx

from sitsc.core.calibration import calibration_for, measured_error
from sitsc.core.errors import MemoryPlanError, OptionError
from sitsc.core.hardware import TargetData
from sitsc.core.options import CompileOptions
from sitsc.core.plan import (
    SCHEMA,
    ArenaBuffer,
    KvGroup,
    Memory,
    Model,
    Numerics,
    Package,
    Parallel,
    Plan,
    Prediction,
    Rank,
    Regime,
    Schedule,
    Target,
    Tier,
    Tokens,
)
from sitsc.core.printer import symbol_names
from sitsc.core.weights import DTYPES, WeightSpec
from sitsc.passes.cost import Sizes
from sitsc.passes.launch_time import with_shares
from sitsc.passes.layers import layer_classes
from sitsc.passes.memory import aligned, graph_buffers, plan_arena
from sitsc.passes.schedule import StepSizes, buckets, kv_groups, regimes, step_arguments

PACKAGE = "step"
_KV_SEQUENCES = 2


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the planner needs to know of the model besides its graph."""

    architecture: str
    model_type: str
    dimensions: dict[str, int]
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Workspace:
    """Scratch that kernels need at the largest step, and the names of package constants."""

    bytes: int
    constants: dict[str, str]


def weights_of(graph: fx.Graph) -> tuple[WeightSpec, ...]:
    """Every weight buffer that a graph reads, by name."""
    specs = [n.meta["weight"] for n in graph.nodes if "weight" in n.meta]
    return tuple(sorted(specs, key=lambda spec: spec.name))


def make_plan(
    graph: fx.Graph,
    facts: ModelFacts,
    options: CompileOptions,
    numerics: Numerics,
    data: TargetData,
    workspace: Workspace,
) -> Plan:
    """The plan of one device. Raises MemoryPlanError or OptionError when it cannot be made."""
    context = facts.tokens.max_context
    chunk = min(options.prefill_chunk_tokens, context)
    steps = buckets(options.max_batch, chunk, context)
    groups = kv_groups(graph, options.page_size)
    classes = layer_classes(graph)
    data = with_calibration(data)
    target = data.target
    found = regimes(
        graph, steps, classes, target, options.page_size, PACKAGE, facts.tokens.logits_width
    )
    step_tokens = chunk + options.max_batch
    memory = _memory(graph, groups, options, facts, step_tokens, workspace)
    _check_fits(memory, target)
    return Plan(
        schema=SCHEMA,
        model=Model(
            facts.architecture, facts.model_type, facts.dimensions, classes, weights_of(graph)
        ),
        tokens=facts.tokens,
        target=target,
        parallel=Parallel(1, 1, 1, 1, 1, chunk, ()),
        regimes=found,
        packages=(Package(PACKAGE, f"cpu/{PACKAGE}.pt2", workspace.constants),),
        ranks=(Rank(0, 0, 0),),
        kv=groups,
        memory=memory,
        schedule=_schedule(steps, options, chunk, step_tokens),
        numerics=numerics,
        predictions=predictions(found, memory, data),
    )


def with_calibration(data: TargetData) -> TargetData:
    """The target with what kernels reach of its ceilings, where that was measured."""
    ceilings = with_shares(data.target.ceilings, calibration_for(data))
    return replace(data, target=replace(data.target, ceilings=ceilings))


def _schedule(
    steps: list[StepSizes], options: CompileOptions, chunk: int, step_tokens: int
) -> Schedule:
    return Schedule(
        decode_buckets=tuple(s.tokens for s in steps if s.kind == "decode"),
        prefill_buckets=tuple(s.tokens for s in steps if s.kind == "prefill"),
        max_batch=options.max_batch,
        max_step_tokens=step_tokens,
        prefill_chunk_tokens=chunk,
        num_streams=1,
    )


def _memory(
    graph: fx.Graph,
    groups: tuple[KvGroup, ...],
    options: CompileOptions,
    facts: ModelFacts,
    step_tokens: int,
    workspace: Workspace,
) -> Memory:
    context = facts.tokens.max_context
    wanted = options.kv_tokens or _KV_SEQUENCES * context
    if wanted < context:
        raise OptionError(
            f"--kv-tokens {wanted} cannot hold one sequence of {context} tokens",
            hint=f"--kv-tokens {context} or a smaller --max-context",
        )
    pages = -(-wanted // options.page_size)
    sizes = StepSizes("prefill", step_tokens, options.max_batch, context).values(options.page_size)
    sizes |= {"sequence_pages": -(-context // options.page_size), "pages": pages}
    arena = plan_arena([*_inputs(graph, sizes), _scratch(workspace.bytes)])
    inside = plan_arena(graph_buffers(graph, Sizes(symbol_names(graph), sizes)))
    weights = sum(aligned(spec.nbytes) for spec in weights_of(graph))
    kv_bytes = sum(pages * group.page_bytes for group in groups)
    total = weights + arena.bytes + kv_bytes + inside.bytes
    return Memory(
        weights_bytes=weights,
        arena_bytes=arena.bytes,
        arena=arena.buffers,
        kv_pages=pages,
        kv_bytes=kv_bytes,
        package_bytes=inside.bytes,
        graph_bytes=0,
        slack_bytes=0,
        total_bytes=total,
        tiers=(
            Tier("weights", "host", "read from the artifact into one block of huge pages"),
            Tier("kv", "host", "one block of huge pages, touched when used"),
            Tier("arena", "host", "one allocation"),
        ),
    )


def _inputs(graph: fx.Graph, sizes: dict[str, int]) -> list[ArenaBuffer]:
    """Step inputs at their largest; all live through the one launch of a step."""
    buffers = []
    for argument in step_arguments(graph):
        if argument.source == "arena":
            shape = tuple(sizes[d] if isinstance(d, str) else d for d in argument.shape)
            count = 1
            for size in shape:
                count *= size
            nbytes = count * DTYPES[argument.dtype].itemsize
            buffers.append(ArenaBuffer(argument.name, argument.dtype, shape, 0, nbytes, 0, 0))
    return buffers


def _scratch(nbytes: int) -> ArenaBuffer:
    return ArenaBuffer("workspace", "uint8", (nbytes,), 0, nbytes, 0, 0)


def _check_fits(memory: Memory, target: Target) -> None:
    """Raises MemoryPlanError when a target with a stated size is too small."""
    if target.memory_bytes and memory.total_bytes > target.memory_bytes:
        short = memory.total_bytes - target.memory_bytes
        raise MemoryPlanError(
            f"needs {memory.total_bytes} bytes, {target.name} has {target.memory_bytes}: "
            f"{short} short",
            hint="a smaller --kv-tokens, --max-batch or --weights int8",
        )


def predictions(
    found: tuple[Regime, ...], memory: Memory, data: TargetData
) -> dict[str, Prediction]:
    """Times of every regime and of a start.

    Error bars are the last measured residuals of the target, the worst of decode and of prompts:
    a bar has to hold what was seen. Where nobody measured it, and for a start, which depends on the
    host more than on the target, they are what the target's file says.
    """
    ceilings = data.target.ceilings
    rate = ceilings["weights_load_bytes_per_s"].value
    fixed = ceilings["start_seconds"].value if "start_seconds" in ceilings else 0.0
    seconds = fixed + memory.weights_bytes / rate
    values = {"cold_start": Prediction(seconds, "s", data.prediction_error)}
    errors = {name: measured_error(data, name) for name in ("tpot", "ttft")}
    for regime in found:
        name = "tpot" if regime.kind == "decode" else "ttft"
        key = f"{name}_{regime.name}"
        values[key] = Prediction(regime.predicted_us / 1e3, "ms", errors[name])
    return values
