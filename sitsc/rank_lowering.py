"""The plan of several ranks: a program for each pipeline stage, weights for each rank of it.

What `pipeline.plan_checkpoint` calls for more than one rank; imported late, as lowering is.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from torch import fx

from sitsc import lowering
from sitsc.codegen import cpu
from sitsc.core.errors import OptionError, PartitionError
from sitsc.core.hardware import TargetData
from sitsc.core.options import CompileOptions
from sitsc.core.parallel import Partition, check_partition, even_stages
from sitsc.core.plan import LayerClass, Parallel, Plan, Prediction, Rank, Regime, Stage
from sitsc.model_graphs import ModelGraphs
from sitsc.partition_pipeline import Asked, Slo, Workload, read_slo, read_workload, searcher
from sitsc.passes.for_rank import stage_graphs
from sitsc.passes.layers import num_layers
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.partition_report import check_slo, parallel_of
from sitsc.passes.plan_time import decode_seconds, plan_time, prompt_seconds
from sitsc.passes.planner import PACKAGE, ModelFacts
from sitsc.passes.record_maker import record_of
from sitsc.passes.shard_table import weights_of_rank
from sitsc.passes.stages import CROSSING


def plan_ranks(
    graphs: ModelGraphs,
    facts: ModelFacts,
    options: CompileOptions,
    dtypes: lowering.Dtypes,
    data: TargetData,
    dump: Path | None,
) -> tuple[Plan, lowering.Generate]:
    """The plan of all ranks, and what writes their code.

    Raises PartitionError for what does not divide, naming what would, and OptionError for more
    devices than one host has.
    """
    check_host(options.devices, data)
    passes, context = lowering.pass_tuple(options), lowering.pass_context(dtypes, options)
    whole = graphs.final(dtypes, options, facts.tokens.max_context)
    parallel = choose_parallel(record_of_graph(whole.graph, facts), options, data)
    partition = Partition(parallel.tp, parallel.pp, parallel.ep)
    options = replace(options, tp=parallel.tp, pp=parallel.pp, ep=parallel.ep, slo="", workload="")
    module = graphs.traced(dtypes, options, facts.tokens.max_context)
    cut = stage_graphs(module, passes, partition, parallel.stages, context, dump)
    parts = [module.graph for module in cut]
    numerics = lowering.numerics_of(passes, dtypes, options)
    made = [lowering.make_plan(g, facts, options, numerics, data) for g in parts]
    plan = _joined([plan for plan, _ in made], parts, parallel)
    if data.cuda is not None:
        return plan, lambda folder, done: _generate_all([g for _, g in made], folder, done)
    return plan, lambda folder, done: _generate(parts, folder, done)


def check_host(devices: int, data: TargetData) -> None:
    """Raises OptionError for more devices than a host usually has: an artifact runs on one host."""
    name, most = data.target.name, data.host.devices
    if not 0 < most < devices:
        return
    nodes = next(n for n in range(2, devices + 1) if devices % n == 0 and devices // n <= most)
    raise OptionError(
        f"{devices} {name} are more than the {most} of one host, and an artifact runs on one host",
        hint=f"sitsc partition --target {name} --devices {devices} --nodes {nodes} ranks replicas "
        "and stages over several",
    )


def rank_graph(
    module: fx.GraphModule, options: CompileOptions, dtypes: lowering.Dtypes
) -> fx.GraphModule:
    """The final graph of the ranks that share all layers; `module` is the traced one."""
    passes, context = lowering.pass_tuple(options), lowering.pass_context(dtypes, options)
    bounds = even_stages(num_layers(module.graph), 1)
    return stage_graphs(module, passes, Partition(options.tp), bounds, context)[0]


def record_of_graph(graph: fx.Graph, facts: ModelFacts) -> ModelRecord:
    """What the cost model knows of a final graph."""
    tokens = facts.tokens
    return record_of(graph, facts.architecture, tokens.logits_width, tokens.max_context)


def choose_parallel(record: ModelRecord, options: CompileOptions, data: TargetData) -> Parallel:
    """The partition asked for, or the best that takes all devices; stages of about equal time.

    Raises PartitionError for what does not divide or fit, and when nothing does.
    """
    slo = read_slo(options.slo) if options.slo else Slo()
    load = read_workload(options.workload, "--workload") if options.workload else Workload()
    search = searcher(record, data.target.name, Asked(options.devices))
    if options.num_ranks == 1 and options.ep == 1:
        found = search.run(options.devices, load, slo, flips=False)
        check_slo(found)
        fits = [c for c in found.ranked if c.partition.dp == 1]
        if not fits:
            raise PartitionError(
                f"the model cannot be cut among {options.devices} {data.target.name}",
                hint=f"sitsc partition --devices {options.devices} says why",
            )
        return parallel_of(search, found, fits[0], options.prefill_chunk_tokens)
    asked = Partition(options.tp, options.pp, options.ep)
    check_partition(asked, search.divides)
    try:
        found = search.run(options.devices, load, slo, flips=False)
        known = next(c for c in found.ranked if c.partition == asked)
    except (PartitionError, StopIteration):  # too large by the model: the planner tells by how much
        bounds = search.replica(asked).bounds
        return Parallel(asked.tp, asked.pp, asked.ep, 1, asked.pp, 0, (), bounds)
    return parallel_of(search, found, known, options.prefill_chunk_tokens)


def _joined(plans: list[Plan], graphs: list[fx.Graph], parallel: Parallel) -> Plan:
    """The plans of all stages as one; times add up, memory is that of the fullest rank."""
    classes: list[LayerClass] = []
    stages = []
    for index, (plan, graph, layers) in enumerate(
        zip(plans, graphs, pairwise(parallel.stages), strict=True)
    ):
        names = _merge(classes, plan.model.layer_classes)
        stages.append(_stage(plan, graph, index, layers, parallel.tp, names))
    first = plans[0]
    ranks = [Rank(r, *divmod(r, parallel.tp)) for r in range(parallel.tp * parallel.pp)]
    plan = replace(
        first,
        model=replace(first.model, layer_classes=tuple(classes), parameters=()),
        target=replace(first.target, device_count=parallel.tp * parallel.pp),
        parallel=replace(parallel, chunk_tokens=first.parallel.chunk_tokens),
        regimes=(),
        packages=(),
        ranks=tuple(ranks),
        kv=(),
        memory=max((plan.memory for plan in plans), key=lambda memory: memory.total_bytes),
        predictions={},
        stages=tuple(stages),
    )
    return replace(plan, predictions=_predictions(plan, plans))


def _predictions(plan: Plan, plans: list[Plan]) -> dict[str, Prediction]:
    """A start takes as long as the slowest rank; micro-batches and chunks share the stages."""
    time, found = plan_time(plan), {}
    contexts = {r.sizes["sequences"]: r.sizes["context"] for r in _decoding(plan)}
    for key, value in plans[0].predictions.items():
        name, _, size = key.rpartition("_")
        if key == "cold_start":
            predicted = max(one.predictions[key].value for one in plans)
        elif len(plans) == 1:
            predicted = value.value
        elif name == "tpot_decode":
            predicted = 1e3 * decode_seconds(plan, time, int(size), contexts[int(size)])
        else:
            predicted = 1e3 * prompt_seconds(plan, time, int(size))
        found[key] = replace(value, value=predicted)
    return found


def _decoding(plan: Plan) -> list[Regime]:
    return [regime for regime in plan.stages[0].regimes if regime.kind == "decode"]


def _merge(known: list[LayerClass], more: tuple[LayerClass, ...]) -> dict[str, str]:
    """Add the classes of a stage; what each of its names is called now."""
    names = {}
    for item in more:
        same = next((c for c in known if c.digest == item.digest), None)
        if same is None:
            same = replace(item, name=f"layer_{chr(ord('a') + len(known))}", layers=())
            known.append(same)
        names[item.name] = same.name
        place = known.index(same)
        known[place] = replace(same, layers=tuple(sorted({*same.layers, *item.layers})))
    return names


def _stage(
    plan: Plan,
    graph: fx.Graph,
    index: int,
    layers: tuple[int, int],
    tp: int,
    names: dict[str, str],
) -> Stage:
    """One stage out of the plan of its graph."""
    receives = [str(n.meta.get("input", "")) for n in graph.nodes if n.op == "placeholder"]
    return Stage(
        layers=layers,
        receives=tuple(name for name in receives if name.startswith(CROSSING)),
        sends=tuple(graph.output_node().meta.get("outputs", ())),
        parameters=tuple(weights_of_rank(graph, rank) for rank in range(tp)),
        regimes=tuple(_renamed(regime, names) for regime in plan.regimes),
        packages=tuple(replace(p, file=f"cpu/{_package(index)}.pt2") for p in plan.packages),
        kv=plan.kv,
        memory=plan.memory,
    )


def _renamed(regime: Regime, names: dict[str, str]) -> Regime:
    rows = tuple(replace(k, layer_class=names.get(k.layer_class, "")) for k in regime.kernels)
    return replace(regime, kernels=rows)


def _package(index: int) -> str:
    return f"{PACKAGE}_{index}"


def _generate_all(
    stages: list[lowering.Generate], folder: Path, progress: Callable[[float], None]
) -> None:
    """The code of one stage after the other; what they share is made once."""
    for index, generate in enumerate(stages):
        generate(folder, lambda s, i=index: progress((i + s) / len(stages)))


def _generate(graphs: list[fx.Graph], folder: Path, progress: Callable[[float], None]) -> None:
    """The packages of all stages, and the kernels, which they share."""
    for index, graph in enumerate(graphs):
        cpu.generate(
            graph, folder, lambda s, i=index: progress((i + s) / len(graphs)), _package(index)
        )
