"""The plan: everything that will be executed, as a document that people read and programs obey.

Canonical JSON, the same bytes on every machine. `sha256` names the plan; `runs` covers all but the
predictions: equal `runs` means that the same things are executed. Sizes in bytes, times in
microseconds.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

from sitsc.core.canonical import canonical_json, digest, sha256_hex
from sitsc.core.errors import PlanError
from sitsc.core.records import from_value, to_value
from sitsc.core.weight_spec import WeightSpec

SCHEMA = 1
PLAIN = "plain"
UNMATCHED = "unmatched"  # before the kind, in KernelRow.by: operators that no matcher knew
PLACE_GROUP = "place"  # launched only before a step with tokens that the host does not know
DRAW_GROUP = "draw"  # launched only where a sequence of the step has a temperature
# Groups of launches around the model, in their order.
STEP_GROUPS = (PLACE_GROUP, "sample", DRAW_GROUP, "next")


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One limit of the hardware used for predictions, and where the number comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Target:
    """What the plan runs on."""

    name: str
    isa: str
    device_count: int
    threads: int
    topology: str
    memory_bytes: int
    ceilings: dict[str, Ceiling]


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Decoder layers that are the same but for their weights."""

    name: str
    layers: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Model:
    """What is compiled: dimensions and every weight buffer with its shape, dtype and sources."""

    architecture: str
    model_type: str
    dimensions: dict[str, int]
    layer_classes: tuple[LayerClass, ...]
    parameters: tuple[WeightSpec, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The vocabulary, and where generation ends."""

    vocab_size: int
    logits_width: int
    bos_token_id: int | None
    add_bos: bool
    eos_token_ids: tuple[int, ...]
    max_context: int


@dataclass(frozen=True, slots=True)
class Alternative:
    """A partition that was considered: its prediction, or the constraint that it fails.

    Of one that cannot be, `change` is the smallest change that would do, and the figures are 0.
    """

    tp: int
    pp: int
    ep: int
    dp: int
    feasible: bool
    reason: str
    change: str = ""
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    tokens_per_s: float = 0.0
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Granularity:
    """Bytes of a piece of a message that is cut over a link: the best, and what is near it."""

    link: str
    ranks: int
    message_bytes: int
    best_bytes: int
    low_bytes: int
    high_bytes: int


@dataclass(frozen=True, slots=True)
class PrefillCut:
    """How prompts from `low_tokens` up to `high_tokens` (both included) are computed.

    `how` is "whole" (one step), "chunked" (steps one after the other) or "pipelined" (chunks
    through stages at the same time). `ttft_ms` is that of the longest.
    """

    low_tokens: int
    high_tokens: int
    how: str
    chunk_tokens: int
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class Parallel:
    """The partition and granularity chosen, and what was not chosen.

    `stages` holds the first layer of each stage and the number of layers.
    """

    tp: int
    pp: int
    ep: int
    dp: int
    micro_batch: int
    chunk_tokens: int
    alternatives: tuple[Alternative, ...]
    stages: tuple[int, ...] = ()
    granularity: tuple[Granularity, ...] = ()
    cuts: tuple[PrefillCut, ...] = ()


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a launch.

    `source` says what `buffer` names: "arena", "weight", "kv", "size" (of the step) or "scalar"
    (`value`). Of a plain plan: "input", what the caller gives, and for outputs "tensor" (the only
    result), "item" (of a tuple) or "key" (of a dictionary). `shape` holds sizes, or their names
    ("tokens", "sequences+1"); for a tensor map those of the dense tensor that it is of. `offset`
    and `layer_stride` are bytes from the start of the buffer, the second once a layer of the group.
    """

    name: str
    source: str
    buffer: str
    dtype: str
    shape: tuple[int | str, ...]
    value: float | None = None
    offset: int = 0
    layer_stride: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One thing the executor calls: a package, a kernel of ours, or a library call."""

    kind: str
    kernel: str
    template: str
    tile: dict[str, int]
    grid: tuple[int | str, ...]
    arguments: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    stream: int
    dependent: bool
    bytes: int
    flops: int
    predicted_us: float


@dataclass(frozen=True, slots=True)
class LaunchGroup:
    """Launches in order; with layers, repeated for each.

    "{layer}" in a weight's name is replaced by the layer, "{layer+1}" by the one after it.
    """

    name: str
    layers: tuple[int, ...]
    launches: tuple[Launch, ...]


def greedy(groups: Iterable[LaunchGroup]) -> tuple[LaunchGroup, ...]:
    """What of them a step launches in which no sequence has a temperature: as predicted."""
    return tuple(group for group in groups if group.name != DRAW_GROUP)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One kernel class inside the launches of a regime, for people and for cost accounting."""

    name: str
    op: str
    by: str
    layer_class: str
    count: int
    bytes: int
    flops: int
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Regime:
    """What is launched for steps of up to these sizes."""

    name: str
    kind: str
    sizes: dict[str, int]
    groups: tuple[LaunchGroup, ...]
    kernels: tuple[KernelRow, ...]
    predicted_us: float


@dataclass(frozen=True, slots=True)
class Package:
    """A compiled package: its file in the artifact, and which weight each of its constants is."""

    name: str
    file: str
    constants: dict[str, str]


@dataclass(frozen=True, slots=True)
class Rank:
    """Which program a rank runs."""

    rank: int
    program: int
    shard: int


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one KV pool and layout; `window` 0 keeps every token."""

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    page_tokens: int
    page_bytes: int
    window: int
    dtype: str
    layout: str


@dataclass(frozen=True, slots=True)
class ArenaBuffer:
    """One planned buffer: lives from step `first` to step `last`, both included."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Tier:
    """Where a class of data lives and how it gets there."""

    data: str
    place: str
    method: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device, to the byte; `package_bytes` bounds what a package allocates itself."""

    weights_bytes: int
    arena_bytes: int
    arena: tuple[ArenaBuffer, ...]
    kv_pages: int
    kv_bytes: int
    package_bytes: int
    graph_bytes: int
    slack_bytes: int
    total_bytes: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sizes that the scheduler obeys."""

    decode_buckets: tuple[int, ...]
    prefill_buckets: tuple[int, ...]
    max_batch: int
    max_step_tokens: int
    prefill_chunk_tokens: int
    num_streams: int


@dataclass(frozen=True, slots=True)
class Numerics:
    """In what precision, and which passes change results.

    With `batch_invariant` a sequence gets the same bits whatever is computed beside it, as long as
    the steps differ only `invariant_within`: "any step", or "a decode bucket" (steps that replay
    one graph; prefill and other buckets may round otherwise).
    """

    dtype: str
    weights: str
    kv_dtype: str
    accumulate: str
    batch_invariant: bool
    invariant_within: str
    changing_passes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted figure and its relative error bar."""

    value: float
    unit: str
    error: float


@dataclass(frozen=True, slots=True)
class Stage:
    """What the ranks of one pipeline stage run, each with weights of its own.

    `layers` are the first one and the one after the last. What crosses into the stage and out of it
    is named by `receives` and `sends`, as its packages take and give it. `parameters` are of each
    tensor-parallel rank.
    """

    layers: tuple[int, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    parameters: tuple[tuple[WeightSpec, ...], ...]
    regimes: tuple[Regime, ...]
    packages: tuple[Package, ...]
    kv: tuple[KvGroup, ...]
    memory: Memory


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module.

    A plan for several ranks has `stages`; what they say is empty here, and `memory` that of the
    fullest rank. `of_rank` makes the plan of one.
    """

    schema: int
    model: Model
    tokens: Tokens
    target: Target
    parallel: Parallel
    regimes: tuple[Regime, ...]
    packages: tuple[Package, ...]
    ranks: tuple[Rank, ...]
    kv: tuple[KvGroup, ...]
    memory: Memory
    schedule: Schedule
    numerics: Numerics
    predictions: dict[str, Prediction]
    stages: tuple[Stage, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Processes that run the plan together."""
        return len(self.ranks)

    def of_rank(self, rank: int) -> "Plan":
        """The plan of one rank alone; raises PlanError for a rank that there is not."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"the plan has no rank {rank}", hint=f"it is for {self.num_ranks}")
        if not self.stages:
            return self
        stage = self.stages[self.ranks[rank].program]
        parameters = stage.parameters[self.ranks[rank].shard]
        return replace(
            self,
            model=replace(self.model, parameters=parameters),
            regimes=stage.regimes,
            packages=stage.packages,
            kv=stage.kv,
            memory=stage.memory,
            stages=(),
        )

    @property
    def kind(self) -> str:
        """ "decoder" (pages, scheduler) or "plain": one regime, from inputs to outputs by name.

        Its sizes are those of the examples, and the bounds of a free size "batch" are the
        dimensions "batch_min" and "batch_max" (absent: none) of the model.
        """
        return PLAIN if [regime.kind for regime in self.regimes] == [PLAIN] else "decoder"

    def text(self) -> str:
        """The canonical text."""
        return canonical_json(to_value(self))

    def sha256(self) -> str:
        """The name of the plan."""
        return sha256_hex(self.text().encode())

    def runs(self) -> str:
        """The digest of all that is executed: equal when the same things run."""
        return digest(_without_predictions(to_value(self)))


def _without_predictions(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = ("predictions", "predicted_us", "ceilings", "alternatives")
        return {k: _without_predictions(v) for k, v in value.items() if k not in dropped}
    if isinstance(value, list):
        return [_without_predictions(item) for item in value]
    return value


def read_plan(text: str, where: str = "plan.json") -> Plan:
    """The plan of a text. Raises PlanError for a newer schema, unknown keys or a malformed text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PlanError(f"not JSON: {error}", where=where, hint="the file is damaged") from None
    except RecursionError:
        raise PlanError("nested too deep", where=where, hint="the file is no plan") from None
    if not isinstance(value, dict) or not isinstance(value.get("schema"), int):
        raise PlanError("no plan in this file", where=where)
    if value["schema"] != SCHEMA:
        raise PlanError(
            f"plan schema {value['schema']}, this version reads {SCHEMA}",
            where=where,
            hint="compile again, or use the version that wrote it",
        )
    return from_value(Plan, value, "plan")


def section_names() -> tuple[str, ...]:
    """The top-level sections of a plan."""
    return tuple(f.name for f in fields(Plan))
