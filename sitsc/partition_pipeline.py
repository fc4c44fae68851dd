"""From a model to its ranked partitions: trace, passes, record, search. Reads no weight.

Part of the pipeline; `sitsc partition` and, for several devices, the compiler call it.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sitsc.core.calibration import residuals_text
from sitsc.core.errors import OptionError
from sitsc.core.hardware import load_target
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Parallel
from sitsc.core.records import to_value
from sitsc.passes.collectives import Topology, topology_of
from sitsc.passes.model_record import ModelRecord
from sitsc.passes.op_time import Sizes
from sitsc.passes.partition import Candidate, Found, Load, Search, machine
from sitsc.passes.partition_report import (
    OpShare,
    Point,
    check_slo,
    fewest_devices,
    nearest_miss,
    op_shares,
    parallel_of,
    pareto,
    points,
)
from sitsc.passes.workloads import Slo, Workload, read_slo, read_workload
from sitsc.record_cache import recorded

if TYPE_CHECKING:
    from sitsc.pipeline import Progress

MOST_DEVICES = 1024

__all__ = [
    "MOST_DEVICES",
    "Asked",
    "Candidate",
    "Load",
    "Report",
    "Slo",
    "Workload",
    "check",
    "read_slo",
    "read_workload",
    "record_model",
    "report",
    "report_value",
    "searcher",
]


@dataclass(frozen=True, slots=True)
class Asked:
    """The question: devices on nodes and links ("" for the usual ones), workload, limits.

    `ideal`: with the best collectives that links allow, executed or not.
    """

    devices: int
    nodes: int = 1
    link: str = ""
    between: str = ""
    overlap: bool = False
    workload: Workload = field(default_factory=Workload)
    slo: Slo = field(default_factory=Slo)
    ideal: bool = False

    def __post_init__(self) -> None:
        """Raises OptionError for a number of devices that is not possible, or a link of none."""
        if not 1 <= self.devices <= MOST_DEVICES:
            raise OptionError(
                f"--devices {self.devices} is outside 1..{MOST_DEVICES}", hint="such as 8"
            )
        if self.between and self.nodes == 1:
            raise OptionError(
                f"--between {self.between} with one node", hint="--nodes 2 or more, or leave it out"
            )


@dataclass(frozen=True, slots=True)
class Report:
    """All that `sitsc partition` tells."""

    model: str
    target: str
    topology: str
    calibration: str
    found: Found
    best: Candidate
    parallel: Parallel
    points: tuple[Point, ...]
    front: tuple[Point, ...]
    ops: tuple[OpShare, ...]
    fewest: tuple[int, Candidate] | None
    miss: Candidate | None


def record_model(
    model: str | Path, options: CompileOptions, progress: "Progress" = lambda phase, share: None
) -> ModelRecord:
    """The record of a checkpoint as compiled with `options`, from the cache if it is there.

    Raises SitscError.
    """
    return recorded(model, options, lambda: _traced_record(model, options, progress))


def _traced_record(model: str | Path, options: CompileOptions, progress: "Progress") -> ModelRecord:
    from sitsc.frontend.checkpoint import open_checkpoint  # noqa: PLC0415  (imports torch)
    from sitsc.frontend.head_widths import check_head_widths  # noqa: PLC0415

    check_head_widths(open_checkpoint(model).config, options.target)  # before what takes seconds
    from sitsc import lowering  # noqa: PLC0415  (transformers and the passes: seconds to import)
    from sitsc.passes.record_maker import record_of  # noqa: PLC0415
    from sitsc.pipeline import inspect  # noqa: PLC0415

    checkpoint = inspect(model, options)
    facts = lowering.model_facts(checkpoint, options)
    dtypes = lowering.resolve_dtypes(checkpoint.config, options)
    progress("trace", 0.0)
    module = lowering.trace_checkpoint(checkpoint, dtypes, options, facts.tokens.max_context)
    facts = lowering.fit_context(facts, checkpoint, options, module.graph)
    context = facts.tokens.max_context
    progress("passes", 0.0)
    lowering.run(module, dtypes, options, None)
    return record_of(module.graph, facts.architecture, facts.tokens.logits_width, context)


def check(target: str, asked: Asked) -> None:
    """Raises OptionError or TargetError for a question that no model could answer."""
    _topology(target, asked)


def _topology(target: str, asked: Asked) -> Topology:
    a = asked
    data = load_target(target)
    return topology_of(data, a.devices, a.nodes, a.link, a.between, ideal=a.ideal)


def _where_text(search: Search, asked: Asked) -> str:
    """Where the devices are, and what of the answer is a forecast."""
    where, most = search.machine.where, search.machine.data.host.devices
    text = where.text()
    if 0 < most < where.per_node:
        text += f", more than the {most} of a usual host (--nodes)"
    if asked.nodes > 1:
        text += ", a forecast: an artifact runs on one host"
    if asked.overlap:
        text += ", hypothetical: sums of prompts hidden behind computing, which nothing executes"
    return text


def searcher(record: ModelRecord, target: str, asked: Asked) -> Search:
    """The search of a model on a target's devices and links. Raises OptionError, TargetError."""
    where = _topology(target, asked)
    return Search(record, machine(load_target(target), where, overlap=asked.overlap))


def report(record: ModelRecord, target: str, asked: Asked) -> Report:
    """Everything about the partitions of a model. Raises PartitionError when none can be."""
    search = searcher(record, target, asked)
    found = search.run(asked.devices, asked.workload, asked.slo)
    check_slo(found)
    best = found.ranked[0]
    every = points(search, found)
    batch, limited = best.batch, asked.slo != Slo()
    few = fewest_devices(search, asked.devices, asked.workload, asked.slo) if limited else None
    own = search.machine.calibration
    text = "ceilings alone, no calibration"
    if own is not None:
        alike = "" if own.target == target else f" (shares of {own.target}, nobody has measured it)"
        text = residuals_text(own) + alike
    return Report(
        model=record.architecture,
        target=target,
        topology=_where_text(search, asked),
        calibration=text,
        found=found,
        best=best,
        parallel=parallel_of(search, found, best),
        points=every,
        front=pareto(every),
        ops=op_shares(search, best.partition, Sizes(batch, batch, batch, asked.workload.context)),
        fewest=few,
        miss=nearest_miss(found) if limited else None,
    )


def report_value(made: Report) -> dict[str, Any]:
    """The report as one JSON value; relative figures are fractions."""
    found = made.found
    return {
        "model": made.model,
        "target": made.target,
        "devices": found.devices,
        "topology": made.topology,
        "calibration": made.calibration,
        "workload": to_value(found.workload),
        "slo": to_value(found.slo),
        "ranked": [_candidate_value(c) for c in found.ranked],
        "rejected": [
            {"partition": to_value(r.partition), "reason": r.reason, "change": r.change}
            for r in found.rejected
        ],
        "crossovers": [
            {"concurrency": f.concurrency, "partition": to_value(f.partition)} for f in found.flips
        ],
        "parallel": to_value(made.parallel) | {"alternatives": len(made.parallel.alternatives)},
        "pareto": [to_value(p) for p in made.front],
        "operators": [to_value(o) | {"share": o.share} for o in made.ops],
        "fewest_devices": made.fewest
        and {"devices": made.fewest[0], "partition": to_value(made.fewest[1].partition)},
        "nearest_miss": made.miss
        and {"partition": to_value(made.miss.partition), "times_the_limit": made.miss.miss},
    }


def _candidate_value(c: Candidate) -> dict[str, Any]:
    value = to_value(c) | {"text": c.partition.text(), "meets": c.meets, "rank_by": c.tokens_per_s}
    if math.isinf(c.budget.limit):  # a target without a stated size
        value["budget"]["limit"] = None
    return value
