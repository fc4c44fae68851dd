"""Deliberate faults and harmless changes, made where a person would make them: in passes, rules,
target data, constants of the cost model, options, checkpoints. Plans are then made anew.

Each changes things through a `MonkeyPatch` and may give other options or another model.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import fx, nn

import sitsc.codegen.cuda as cuda
import sitsc.core.tiles as tiles
import sitsc.lowering as lowering
import sitsc.passes.cost as cost
import sitsc.passes.cuda_planner as cuda_planner
import sitsc.passes.planner as planner
import sitsc.passes.schedule as schedule
import sitsc.passes.shard as shard
import sitsc.rank_lowering as rank_lowering
from sitsc import pipeline
from sitsc.core.calibration import Calibration
from sitsc.core.hardware import TargetData, load_target
from sitsc.core.ops.collectives import all_reduce  # noqa: F401  (registers the operators)
from sitsc.core.options import CompileOptions
from sitsc.models.presets import preset
from sitsc.models.random_checkpoint import write_random
from sitsc.passes.base import Pass

GPU = CompileOptions(target="h200", max_batch=4, prefill_chunk_tokens=128)
CPU = CompileOptions(target="cpu", max_batch=4, prefill_chunk_tokens=128)
INT8, TWO_RANKS = replace(CPU, weights="int8"), replace(CPU, tp=2)
STAGES = replace(CPU, pp=2)
_TUPLES = ("CPU", "CPU_INT8", "CUDA", "CUDA_WIDE")
_TRACE, _RUN = lowering.trace, lowering.run_passes
_TRACED: dict[str, fx.GraphModule] = {}
_FINAL: dict[str, fx.Graph] = {}


def trace_once(config: dict[str, Any], *rest: Any) -> fx.GraphModule:
    """A copy of the traced graph; each is traced once, as nothing here changes how."""
    key = json.dumps([config, str(rest)], sort_keys=True, default=str)
    if key not in _TRACED:
        _TRACED[key] = _TRACE(config, *rest)
    module = fx.GraphModule(nn.Module(), copy.deepcopy(_TRACED[key].graph))
    module.meta["traced"] = key
    return module


def run_once(module: fx.GraphModule, passes: tuple[Pass, ...], context: Any, **more: Any) -> None:
    """The same passes over the same graph run once; for faults that change nothing inside them."""
    key = f"{module.meta['traced']} {passes} {context}"
    if key not in _FINAL:
        _RUN(module, passes, context, **more)
        _FINAL[key] = module.graph
    module.graph = copy.deepcopy(_FINAL[key])


@dataclass(frozen=True, slots=True)
class Subject:
    """What is planned: a preset, or a config by that name with other values, and options."""

    options: CompileOptions = GPU
    preset: str = "tiny-llama"
    config: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """A checkpoint of headers in a new folder."""
        if folder.exists():
            return folder
        config = preset(self.preset) | self.config
        how: dict[str, Any] = {"headers_only": True} | self.checkpoint
        return write_random(config, folder, **how)


Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A change and words that the first three lines of the diff have; none for a harmless one."""

    name: str
    words: tuple[str, ...] = ()
    change: Break = lambda patch: None
    base: Subject = Subject()
    after: Subject | None = None


# --- ways to change things ------------------------------------------------------------------------


def passes(edit: Callable[[tuple[Pass, ...]], tuple[Pass, ...]]) -> Break:
    """Other tuples of passes."""

    def change(patch: pytest.MonkeyPatch) -> None:
        for name in _TUPLES:
            patch.setattr(lowering, name, edit(getattr(lowering, name)))

    return change


def without(*names: str) -> Break:
    """Passes left out."""
    return passes(lambda whole: tuple(p for p in whole if type(p).__name__ not in names))


def value(module: Any, name: str, new: Any) -> Break:
    """Another value of a constant, or another function."""
    return lambda patch: patch.setattr(module, name, new)


def wrapped(module: Any, name: str, edit: Callable[[Any], Any]) -> Break:
    """A function whose result is edited."""
    real = getattr(module, name)
    return lambda patch: patch.setattr(module, name, lambda *a, **k: edit(real(*a, **k)))


def data(edit: Callable[[TargetData], TargetData]) -> Break:
    """Other numbers of the target."""

    def change(patch: pytest.MonkeyPatch) -> None:
        for module in (lowering, pipeline):
            patch.setattr(module, "load_target", lambda name: edit(load_target(name)))

    return change


def ceiling(name: str, factor: float = 1.0, source: str = "") -> Break:
    """Another ceiling, or another source of it."""

    def edit(known: TargetData) -> TargetData:
        old = known.target.ceilings[name]
        new = replace(old, value=old.value * factor, source=source or old.source)
        target = replace(known.target, ceilings=known.target.ceilings | {name: new})
        return replace(known, target=target)

    return data(edit)


def sms(count: int) -> Break:
    """Another number of multiprocessors."""

    def edit(known: TargetData) -> TargetData:
        assert known.cuda is not None
        return replace(known, cuda=replace(known.cuda, num_sms=count))

    return data(edit)


def drop_rule(name: str) -> Break:
    """An operator of which a rank no longer knows how to compute its part."""
    return lambda patch: patch.delitem(shard._RULES, name)


class SumAgain:
    """A pass that sums among ranks what is summed already."""

    name: ClassVar[str] = "sum_again"
    preserves_numerics: ClassVar[bool] = False

    def run(self, graph: fx.Graph, context: Any) -> None:
        del context
        for node in [n for n in graph.nodes if "all_reduce" in str(n.target)]:
            if any("all_reduce" in str(user.target) for user in node.users):
                continue
            with graph.inserting_after(node):
                again = graph.call_function(node.target, (node, None, "tp"))  # pyright: ignore
            again.meta = dict(node.meta)
            node.replace_all_uses_with(again, lambda user, again=again: user is not again)


def options(base: CompileOptions, **changes: Any) -> Subject:
    """The same model with other options."""
    return Subject(replace(base, **changes))


# --- faults ---------------------------------------------------------------------------------------

ON_CPU, ON_INT8, ON_TWO = Subject(CPU), Subject(INT8), Subject(TWO_RANKS)
EXPERTS = Subject(GPU, "tiny-mixtral")
_HALF_BYTES = wrapped(
    cuda_planner,
    "kv_groups",
    lambda groups: tuple(replace(g, page_bytes=g.page_bytes // 2) for g in groups),
)
_FEWER_STAGES = wrapped(
    tiles, "_skinny", lambda choice: replace(choice, tile=choice.tile | {"stages": 2})
)
_ONE_MORE = wrapped(cost, "attention_cost", lambda found: (found[0], 2 * found[1]))
_MORE_BYTES = wrapped(cost, "attention_cost", lambda found: (2 * found[0], found[1]))
_ONE_BLOCK = wrapped(
    tiles, "_gemv", lambda choice: replace(choice, tile=choice.tile | {"block_n": 1})
)


def _slower_kernels(known: Calibration | None) -> Calibration | None:
    """A calibration whose kernels cost more than was measured."""
    assert known is not None
    item = known.parameters["kernel_seconds"]
    made = known.parameters | {"kernel_seconds": replace(item, value=2 * item.value)}
    return replace(known, parameters=made)


FAULTS = (
    Fault("the gate is no longer fused", ("fusion lost", "glu of mlp"), without("FuseGlu")),
    Fault("q, k and v are no longer merged", ("fusion lost", "q_proj"), without("MergeLinears")),
    Fault("norms stand alone", ("fusion lost", "rms_norm of"), without("FuseNorm")),
    Fault("sums stand alone", ("fusion lost", "add of"), without("FuseResidual")),
    Fault("no table of angles", ("fusion lost", "rope_table"), without("MatchRopeTable")),
    Fault("rope is not recognised", ("fusion lost", "self_attn"), without("MatchRope")),
    Fault("all rows are computed", ("choice of rows", "index"), without("SelectRows")),
    Fault("residual in bfloat16", ("changing passes", "widen_residual"), without("WidenResidual")),
    Fault(
        "dtype widened",
        ("dtype: bfloat16 → float32",),
        base=ON_CPU,
        after=options(CPU, dtype="float32"),
    ),
    Fault(
        "KV cache widened",
        ("kv dtype: bfloat16 → float32",),
        base=ON_CPU,
        after=options(CPU, kv_dtype="float32"),
    ),
    Fault("not quantised", ("changing passes", "quantise"), without("QuantiseInt8"), ON_INT8),
    Fault("not packed", ("weights", "n16k2 → bfloat16 plain"), without("PackWeights"), ON_CPU),
    Fault(
        "an operator without a kernel",
        ("embedding of embed_tokens", "embed_tokens"),
        without("LowerEmbedding"),
        ON_CPU,
    ),
    Fault("a tile with fewer stages", ("tile", "stages 4 → stages 2"), _FEWER_STAGES),
    Fault("a tile with fewer rows", ("tile", "block_n 2 → block_n 1"), _ONE_BLOCK),
    Fault("the library in place of ours", ("library, not ours",), value(tiles, "SKINNY_TOKENS", 2)),
    Fault("another template", ("template", "gemv", "skinny"), value(tiles, "GEMV_TOKENS", 0)),
    Fault("fewer splits", ("tile", "splits 32", "splits 2"), value(tiles, "_MOST_SPLITS", 2)),
    Fault(
        "norms by one program",
        ("separate_norm 8 → separate_norm 1",),
        value(tiles, "NORM_PROGRAMS", 1),
    ),
    Fault(
        "the second best prefill",
        ("tile: attention_prefill", "block_n 64 → block_n 128"),
        wrapped(cuda, "prefill_candidates", lambda found: found[3:]),
    ),
    Fault(
        "launches wait",
        ("dependent launch", "starts early → waits"),
        value(cuda, "_DEPENDENT_FROM", 100),
    ),
    Fault(
        "a tile of experts",
        ("tile", "moe_linear", "stages 4 → stages 2"),
        wrapped(cuda, "experts_tile", lambda tile: tile | {"stages": 2}),
        EXPERTS,
    ),
    Fault("fewer multiprocessors", ("programs 528 → programs 264",), sms(66)),
    Fault("slower memory", ("TPOT", "ceiling: read_bytes_per_s"), ceiling("read_bytes_per_s", 0.5)),
    Fault("dearer launches", ("TPOT", "ceiling: launch_seconds"), ceiling("launch_seconds", 3.0)),
    Fault(
        "a slower start", ("cold start", "weights_load"), ceiling("weights_load_bytes_per_s", 0.1)
    ),
    Fault(
        "an error bar",
        ("error bar: cold_start: ± 30 % → ± 50 %",),
        data(lambda known: replace(known, prediction_error=0.5)),
        ON_CPU,
    ),
    Fault(
        "larger residuals",
        ("error bar: tpot_decode_1", "→ ± 9 %"),
        wrapped(planner, "measured_error", lambda error: max(error, 0.09)),
    ),
    Fault(
        "kernels take longer",
        ("TPOT", "ceiling: kernel_seconds"),
        wrapped(cuda_planner, "calibration_for", _slower_kernels),
    ),
    Fault("operations counted twice", ("operations counted: self_attn",), _ONE_MORE),
    Fault("bytes counted twice", ("TPOT", "bytes counted: self_attn"), _MORE_BYTES, ON_CPU),
    Fault(
        "launches forgotten",
        ("TPOT", "time of the same work"),
        value(
            schedule,
            "predict_us",
            lambda c, t: 1e6 * c.bytes / t.ceilings["read_bytes_per_s"].value,
        ),
        ON_CPU,
    ),
    Fault(
        "predicted at shorter contexts",
        ("predicted at context",),
        value(cuda_planner, "_CONTEXT", 100),
    ),
    Fault(
        "a decode bucket dropped",
        ("decode buckets dropped 2",),
        value(cuda_planner, "DECODE_BUCKETS", (1, 4)),
    ),
    Fault(
        "a prefill bucket added",
        ("prefill buckets added 64",),
        value(cuda_planner, "PREFILL_BUCKETS", (64, 128)),
    ),
    Fault("smaller batches", ("max batch: 4 → 2",), after=options(GPU, max_batch=2)),
    Fault(
        "smaller chunks",
        ("prefill chunk tokens: 128 → 64",),
        after=options(GPU, prefill_chunk_tokens=64),
    ),
    Fault("smaller pages", ("page_tokens: 64 → 16",), after=options(GPU, page_tokens=16)),
    Fault("pages of half the bytes", ("page_bytes of a layer",), _HALF_BYTES),
    Fault("a page too few", ("KV tokens -",), wrapped(cuda_planner, "kv_pages", lambda n: n - 1)),
    Fault(
        "graphs take more", ("memory +", "(graph)"), value(cuda_planner, "_GRAPH_BYTES", 24 << 20)
    ),
    Fault(
        "more scratch",
        ("memory +", "(arena)"),
        wrapped(lowering, "_workspace", lambda size: 4 * size),
        ON_CPU,
    ),
    Fault(
        "weights aligned to pages",
        ("memory +", "(weights)"),
        value(planner, "aligned", lambda size: -(-size // 4096) * 4096),
        ON_CPU,
    ),
    Fault("two ranks", ("partition: TP 1", "TP 2"), base=ON_CPU, after=ON_TWO),
    Fault("an all-gather added", ("collectives: all_gather",), drop_rule("glu"), ON_TWO),
    Fault(
        "an all-reduce added",
        ("collectives: all_reduce", "4 in each"),
        passes(lambda whole: (*whole[:-1], SumAgain(), whole[-1])),
        ON_TWO,
    ),
    Fault(
        "uneven stages",
        ("stages end at layers: 2 3 → 1 3",),
        wrapped(
            rank_lowering, "choose_parallel", lambda p: replace(p, stages=(0, 1, p.stages[-1]))
        ),
        Subject(STAGES, config={"num_hidden_layers": 3}),
    ),
    Fault(
        "other angles",
        ("values of constant", "inv_freq"),
        after=Subject(config={"rope_theta": 5000.0}),
    ),
    Fault(
        "another epsilon",
        ("code", "another source or other constants"),
        after=Subject(config={"rms_norm_eps": 1e-3}),
    ),
)
