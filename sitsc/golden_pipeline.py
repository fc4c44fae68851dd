"""From a model and limits to a golden configuration: search, plans, evidence.

In: a checkpoint by its headers, a target, a workload, limits. Out: a `Golden` of predicted figures,
whose candidates have plans; measuring them is the caller's. Reads no weight, writes nothing.
"""

from dataclasses import dataclass, replace
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from sitsc.build_info import versions
from sitsc.core.canonical import digest
from sitsc.core.errors import GoldenError, OptionError, SitscError, UnsupportedModelError
from sitsc.core.golden import (
    SCHEMA,
    Golden,
    GoldenAsked,
    GoldenCandidate,
    GoldenModel,
    GoldenRejected,
    Now,
    finished,
    stored_options,
)
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan
from sitsc.core.records import to_value
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.encoder import is_encoder
from sitsc.frontend.lint import key_uses
from sitsc.golden_data import data_digests
from sitsc.golden_search import Choice, Config, choices, rejected_of, search_configs
from sitsc.partition_pipeline import (
    Asked,
    Slo,
    Workload,
    check,
    read_slo,
    read_workload,
    searcher,
)
from sitsc.pipeline import Progress, inspect, plan_checkpoint

if TYPE_CHECKING:
    from sitsc.model_graphs import ModelGraphs
    from sitsc.passes.planner import ModelFacts

__all__ = ["Day", "Slo", "Wish", "Workload", "make", "now", "read_slo"]
__all__ += ["fingerprint", "options_of", "read_workload"]

TOP = 3  # candidates that get a plan and are measured
MOST_DAYS = 3650
_DECIDED = ("tp", "pp", "ep", "max_batch", "max_context", "prefill_chunk_tokens", "kv_tokens")
_INERT = ("inert", "inert at this value")


@dataclass(frozen=True, slots=True)
class Wish:
    """The question: the target with its devices and all options that are not decided here.

    `options` has them; `top` candidates get a plan.
    """

    options: CompileOptions
    workload: Workload
    slo: Slo
    top: int = TOP

    def __post_init__(self) -> None:
        """Raises OptionError or TargetError for a question that no model could answer."""
        check(self.options.target, self.asked)

    @property
    def asked(self) -> Asked:
        """The question as the search takes it."""
        return Asked(self.options.devices, workload=self.workload, slo=self.slo)

    @property
    def stored(self) -> GoldenAsked:
        """The question as a record holds it."""
        w, slo = self.workload, self.slo
        return GoldenAsked(
            w.prompt_tokens,
            w.output_tokens,
            w.concurrency,
            w.rate,
            w.prompts,
            slo.ttft_ms or 0.0,
            slo.tpot_ms or 0.0,
        )


@dataclass(frozen=True, slots=True)
class Day:
    """When a record is made, for how many days it holds, and from which commit ("" if unknown)."""

    today: date
    days: int
    commit: str = ""

    def __post_init__(self) -> None:
        """Raises OptionError."""
        if not 1 <= self.days <= MOST_DAYS:
            raise OptionError(f"--expires-days {self.days}", hint=f"1 to {MOST_DAYS}")

    @property
    def expires(self) -> date:
        """The first day on which the record is stale."""
        return self.today + timedelta(days=self.days)


def make(
    name: str,
    model: str | Path,
    wish: Wish,
    day: Day,
    progress: Progress = lambda phase, share: None,
    *,
    preset: bool = False,
) -> Golden:
    """The golden configuration of `model`, called `name`, by predictions alone.

    With `preset` the name is enough to make the model again.

    Raises PartitionError when nothing can hold the model or keep the limits, GoldenError when
    nothing that should has a plan, SitscError for the model.
    """
    from sitsc import lowering, rank_lowering  # noqa: PLC0415  (transformers and the passes)
    from sitsc.model_graphs import ModelGraphs  # noqa: PLC0415

    if is_encoder(open_checkpoint(model)):
        what = f"{name} is an encoder: there is no batch, chunk or pool to choose"
        raise UnsupportedModelError(what, hint="sitsc compile takes it as it is")
    checkpoint = inspect(model, wish.options)
    options = _with_context(wish, lowering.model_facts(checkpoint, wish.options).tokens.max_context)
    facts = _facts(checkpoint, options, wish)
    dtypes = lowering.resolve_dtypes(checkpoint.config, options)
    graphs = ModelGraphs(checkpoint)
    progress("trace", 0.0)
    graph = graphs.final(dtypes, options, facts.tokens.max_context).graph
    facts = lowering.fit_context(facts, checkpoint, options, graph)
    progress("search", 0.0)
    search = searcher(rank_lowering.record_of_graph(graph, facts), options.target, wish.asked)
    context, page = facts.tokens.max_context, options.page_size
    found = search_configs(search, wish.asked, wish.stored, context, page)
    planned, refused = _planned(checkpoint, graphs, found, options, wish.top, progress)
    golden = Golden(
        schema=SCHEMA,
        made=day.today,
        expires=day.expires,
        digest="",
        commit=day.commit,
        chosen=0,
        model=GoldenModel(name, preset, facts.architecture, fingerprint(checkpoint)),
        target=options.target,
        devices=options.devices,
        options=stored_options(options) | planned[0].options,
        asked=wish.stored,
        data=data_digests(options.target, options.devices),
        compiler=versions(),
        candidates=tuple(planned),
        rejected=(*refused, *rejected_of(found, [c.name for c in planned])),
    )
    return finished(golden)


def _with_context(wish: Wish, usual: int) -> CompileOptions:
    """The options with a longest sequence: as asked for, the usual one, or the workload's.

    Raises OptionError where it was asked for and is too short.
    """
    need, options = wish.workload.most_tokens, wish.options
    if options.max_context and options.max_context < need:
        raise OptionError(
            f"--max-context {options.max_context} is less than the {need} tokens of the workload's "
            "longest prompt and output",
            hint=f"--max-context {need}, or leave it out",
        )
    return replace(options, max_context=max(usual, need))


def _facts(checkpoint: Checkpoint, options: CompileOptions, wish: Wish) -> "ModelFacts":
    """Raises OptionError for a workload that is longer than the model's positions."""
    from sitsc import lowering  # noqa: PLC0415  (as make)

    try:
        return lowering.model_facts(checkpoint, options)
    except OptionError as error:
        if wish.options.max_context:
            raise
        what = f"the workload's longest prompt and output have {wish.workload.most_tokens} tokens"
        raise OptionError(f"{what}: {error.what}", hint="a --workload of shorter ones") from None


def _planned(
    checkpoint: Checkpoint,
    graphs: "ModelGraphs",
    found: Choice,
    options: CompileOptions,
    top: int,
    progress: Progress,
) -> tuple[list[GoldenCandidate], list[GoldenRejected]]:
    """The first `top` configurations that have a plan, and why others have none."""
    planned: list[GoldenCandidate] = []
    refused: list[GoldenRejected] = []
    for config in choices(found):
        if len(planned) == top:
            break
        progress("plan", len(planned) / top)
        own = options_of(config, options)
        try:
            plan = plan_checkpoint(checkpoint, own, graphs=graphs).plan
        except SitscError as error:
            if error.exit_code != SitscError.exit_code:  # a fault of the compiler
                raise
            refused.append(GoldenRejected(config.name, error.what, error.hint))
            continue
        planned.append(_candidate(config, own, plan))
    if not planned:
        first = refused[0]
        raise GoldenError(f"nothing has a plan: {first.name}: {first.reason}", hint=first.change)
    return planned, refused


def options_of(config: Config, options: CompileOptions) -> CompileOptions:
    """The options of a replica of a configuration."""
    p = config.partition
    return replace(
        options,
        devices=p.tp * p.pp,
        tp=p.tp,
        pp=p.pp,
        ep=p.ep,
        max_batch=config.batch,
        max_context=config.max_context,
        prefill_chunk_tokens=config.chunk_tokens,
        kv_tokens=config.kv_tokens,
    )


def _candidate(config: Config, own: CompileOptions, plan: Plan) -> GoldenCandidate:
    schedule, values = plan.schedule, stored_options(own)
    return GoldenCandidate(
        name=config.name,
        replicas=config.partition.dp,
        options={name: values[name] for name in _DECIDED},
        plan=plan.sha256(),
        runs=plan.runs(),
        decode_buckets=schedule.decode_buckets,
        prefill_buckets=schedule.prefill_buckets,
        memory_bytes=plan.memory.total_bytes,
        predicted=config.figures,
        ttft_error=config.ttft_error,
        tpot_error=config.tpot_error,
        not_measured="not yet",
        measured=None,
    )


# --- what a record is held against ----------------------------------------------------------------


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 of what is compiled of a checkpoint: config and headers of its tensors.

    Keys that nothing compiled depends on are left out: a fine-tuned model of the same shape is the
    same one.
    """
    config, program = checkpoint.config, checkpoint.program
    inert = {u.key for u in key_uses(config, frozenset()) if u.use in _INERT}
    headers = {name: [info.dtype, list(info.shape)] for name, info in checkpoint.tensors.items()}
    return digest(
        {
            "config": {k: repr(to_value(v)) for k, v in config.items() if k not in inert},
            "headers": headers,
            "graph": "" if program is None else program.digest(),
        }
    )


def now(
    model: str | Path, options: CompileOptions, devices: int, today: date, *, plan: bool
) -> Now:
    """What is true of a model and its options today; `plan`: with the plan that is made of them.

    Raises SitscError for a model that cannot be opened or planned.
    """
    checkpoint = open_checkpoint(model)
    held = Now(
        today, fingerprint(checkpoint), options.target, data_digests(options.target, devices)
    )
    if not plan:
        return held
    made = plan_checkpoint(inspect(model, options), options).plan
    return replace(held, plan=made.sha256(), runs=made.runs())
