"""The pipeline on one page: checkpoint → graph → passes → plan → code → artifact.

The order in this file is the order that runs. Weights are read only in the last step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx

from sitsc import build_info, packer
from sitsc.core import artifact as files
from sitsc.core import build_cache
from sitsc.core.artifact import Artifact, ArtifactWriter, Manifest
from sitsc.core.canonical import canonical_json, digest
from sitsc.core.errors import CompileError, OptionError, UnsupportedModelError
from sitsc.core.hardware import load_target
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan
from sitsc.core.records import to_value
from sitsc.core.reference import write_reference
from sitsc.core.tiles import TileTable
from sitsc.core.tuning import TuneSet
from sitsc.frontend import onnx_lint
from sitsc.frontend.allowed import check_allowed
from sitsc.frontend.checkpoint import Checkpoint, open_checkpoint
from sitsc.frontend.encoder import is_encoder
from sitsc.frontend.encoder_lint import lint_encoder
from sitsc.frontend.lint import LintReport, lint_checkpoint
from sitsc.frontend.lint import check as check_model
from sitsc.frontend.longrope import longrope_warnings
from sitsc.frontend.range_lint import LARGEST

if TYPE_CHECKING:
    from sitsc.model_graphs import ModelGraphs

Progress = Callable[[str, float], None]
"""Called with a phase ("trace", "passes", "codegen", "pack") and its share done, 0 to 1."""


def _silent(phase: str, share: float) -> None:
    del phase, share


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan of a model, its final graph, its source, and what writes its code to a folder."""

    plan: Plan
    graph: fx.Graph
    checkpoint: Checkpoint
    generate: Callable[[Path, Callable[[float], None]], None]


def compile_model(
    model: str | Path,
    out: str | Path,
    options: CompileOptions,
    progress: Progress = _silent,
    *,
    check: bool = False,
    dump: Path | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Artifact:
    """Compile `model` into the new folder `out`. Raises SitscError; leaves nothing half done.

    `warn` is told what speaks against the model without forbidding it.
    """
    load_target(options.target)
    with ArtifactWriter(Path(out)) as writer:
        checkpoint = open_checkpoint(model)
        if is_encoder(checkpoint):
            check_allowed(checkpoint, frozenset(options.allow_unknown_keys))
            write_tokenizer(checkpoint, writer)
            return _compile_encoder(checkpoint, writer, options, progress, dump)
        checkpoint = inspect(model, options, warn)
        packer.check_options(checkpoint, options)
        key = _key(checkpoint, options)
        entry = None if check or dump else build_cache.find(key)
        if entry is None:
            planned = plan_checkpoint(checkpoint, options, progress, check=check, dump=dump)
            entry = build_cache.add(key, lambda folder: _generate(planned, folder, progress))
        with files.disk_errors(writer.out):
            plan = build_cache.copy_code(entry, writer.root)
        packed = _write_weights(checkpoint, plan, options, writer, progress)
        write_tokenizer(checkpoint, writer)
        return writer.finish(plan, _manifest(checkpoint, plan, packed))


def _compile_encoder(
    checkpoint: Checkpoint,
    writer: ArtifactWriter,
    options: CompileOptions,
    progress: Progress,
    dump: Path | None,
) -> Artifact:
    from sitsc.encoder_pipeline import compile_encoder  # noqa: PLC0415  (the passes)

    return compile_encoder(checkpoint, writer, options, progress, dump)


def inspect(
    model: str | Path, options: CompileOptions, warn: Callable[[str], None] = lambda text: None
) -> Checkpoint:
    """Open the checkpoint by its headers and refuse what the compiler does not understand."""
    checkpoint = open_checkpoint(model)
    allow = frozenset(options.allow_unknown_keys)
    check_allowed(checkpoint, allow)
    if checkpoint.program is not None:  # an ONNX graph says itself what it computes
        return checkpoint
    for text in check_model(checkpoint, allow, options.dtype):
        warn(text)
    for text in longrope_warnings(checkpoint.config, options.max_context):
        warn(text)
    return checkpoint


def lint_model(
    model: str | Path,
    allow: tuple[str, ...] = (),
    dtype: str = "auto",
    *,
    read_weights: bool = False,
) -> LintReport:
    """Everything that its files tell about `model`.

    Raises CheckpointError when it cannot open, OptionError for what is not looked at.
    """
    if dtype not in ("auto", *LARGEST):
        raise OptionError(
            f"--dtype {dtype!r} is unknown", hint=f"one of auto, {', '.join(LARGEST)}"
        )
    try:
        checkpoint = open_checkpoint(model)
    except UnsupportedModelError as error:
        if not onnx_lint.is_onnx(model):
            raise
        return onnx_lint.refused(model, error)
    check_allowed(checkpoint, frozenset(allow))
    unread = {"dtype": dtype != "auto", "weights": read_weights}
    if checkpoint.program is not None or is_encoder(checkpoint):
        if given := [name for name, value in unread.items() if value]:
            raise OptionError(
                f"--{given[0]} is for decoders of config.json and safetensors, or GGUF",
                hint="leave it out",
            )
    if checkpoint.program is not None:
        return onnx_lint.lint_onnx(checkpoint)
    if is_encoder(checkpoint):
        return lint_encoder(checkpoint, frozenset(allow))
    return lint_checkpoint(checkpoint, frozenset(allow), dtype, read_weights=read_weights)


def plan_checkpoint(
    checkpoint: Checkpoint,
    options: CompileOptions,
    progress: Progress = _silent,
    *,
    check: bool = False,
    dump: Path | None = None,
    graphs: "ModelGraphs | None" = None,
) -> Planned:
    """Trace, run the passes and plan; reads no weight and writes nothing but dumps.

    `graphs`: those of the checkpoint, where other plans of it are made as well.
    """
    from sitsc import lowering  # noqa: PLC0415  (transformers and the passes: seconds to import)
    from sitsc.model_graphs import ModelGraphs  # noqa: PLC0415

    data = load_target(options.target)
    facts = lowering.model_facts(checkpoint, options)
    dtypes = lowering.resolve_dtypes(checkpoint.config, options)
    if check:
        lowering.check_checkpoint(checkpoint, dtypes, options)
    progress("trace", 0.0)
    graphs = graphs or ModelGraphs(checkpoint)
    module = graphs.traced(dtypes, options, facts.tokens.max_context)
    facts = lowering.fit_context(facts, checkpoint, options, module.graph)
    progress("passes", 0.0)
    if options.is_cut:
        from sitsc.rank_lowering import plan_ranks  # noqa: PLC0415  (as lowering)

        plan, generate = plan_ranks(graphs, facts, options, dtypes, data, dump)
    else:
        module = graphs.final(dtypes, options, facts.tokens.max_context, dump)
        numerics = lowering.numerics_of(lowering.pass_tuple(options), dtypes, options)
        plan, generate = lowering.make_plan(module.graph, facts, options, numerics, data)
    progress("passes", 1.0)
    return Planned(plan, module.graph, checkpoint, generate)


def build_candidates(
    model: str | Path,
    target: str,
    tokens: tuple[int, ...],
    most: int,
    out: Path,
    progress: Progress = _silent,
    table: TileTable | None = None,
    tp: int = 1,
) -> tuple[TuneSet, list[CompileError]]:
    """Kernels to measure for the linear layers of `model`, and why others were left out.

    With `tp`, those of one of so many ranks.

    At most `most` for each layer and count of `tokens`, compiled into `out`; the search begins with
    `table`, by default the target's own. Raises SitscError.
    """
    from sitsc import lowering  # noqa: PLC0415  (transformers and the passes: seconds to import)

    options, data = CompileOptions(target=target, tp=tp), load_target(target)
    checkpoint = inspect(model, options)
    dtypes = lowering.resolve_dtypes(checkpoint.config, options)
    progress("trace", 0.0)
    module = lowering.trace(checkpoint.config, dtypes.torch_dtype)
    progress("passes", 0.0)
    if tp > 1:
        from sitsc.rank_lowering import rank_graph  # noqa: PLC0415  (as lowering)

        module = rank_graph(module, options, dtypes)
    else:
        lowering.run(module, dtypes, options, None)
    progress("codegen", 0.0)
    with files.disk_errors(out):
        return lowering.build_candidates(
            module.graph, data, options, tokens, most, out, lambda s: progress("codegen", s), table
        )


def _generate(planned: Planned, folder: Path, progress: Progress) -> None:
    """Write the plan and all code of the artifact into `folder`."""
    progress("codegen", 0.0)
    planned.generate(folder, lambda share: progress("codegen", share))
    on_gpu = planned.plan.target.isa.startswith("sm_")
    if not planned.plan.stages:  # of several ranks no graph is the whole model
        write_reference(planned.graph, folder, required=on_gpu)
    (folder / files.PLAN).write_text(planned.plan.text())


def _write_weights(
    checkpoint: Checkpoint,
    plan: Plan,
    options: CompileOptions,
    writer: ArtifactWriter,
    progress: Progress,
) -> bool:
    """Pack the weights into the artifact when asked for and there are any; whether it did."""
    if not packer.wanted(checkpoint, plan, options):
        return False
    packer.pack(checkpoint, plan, writer, lambda share: progress("pack", share))
    return True


def write_tokenizer(checkpoint: Checkpoint, writer: ArtifactWriter) -> None:
    """Copy tokenizer, chat template and special tokens into the artifact."""
    tokenizer = checkpoint.tokenizer
    with files.disk_errors(writer.out):
        if tokenizer.tokenizer_json is not None:
            writer.path(files.TOKENIZER).write_bytes(tokenizer.tokenizer_json)
        if tokenizer.chat_template is not None:
            writer.path(files.CHAT_TEMPLATE).write_text(tokenizer.chat_template)
        special = canonical_json(dict(tokenizer.special_tokens))
        writer.path(files.SPECIAL).write_text(special)


def _manifest(checkpoint: Checkpoint, plan: Plan, packed: bool) -> Manifest:
    return Manifest(
        schema=files.SCHEMA,
        target=plan.target.name,
        plan=plan.sha256(),
        runs=plan.runs(),
        built_with=build_info.versions(),
        packed=packed,
        checkpoint_hint="" if packed else str(checkpoint.root.resolve()),
        files={},
    )


def _key(checkpoint: Checkpoint, options: CompileOptions) -> str:
    """What the code of an artifact depends on: options, config, headers, tools, ourselves."""
    tokenizer: Any = checkpoint.tokenizer
    headers = {name: [i.dtype, list(i.shape)] for name, i in checkpoint.tensors.items()}
    return digest(
        {
            "options": options.fingerprint(),
            "config": digest(_plain(checkpoint.config)),
            "generation": digest(_plain(checkpoint.generation_config)),
            "headers": digest(headers),
            "graph": "" if checkpoint.program is None else checkpoint.program.digest(),
            "tokens": [tokenizer.bos_token_id, tokenizer.add_bos, list(tokenizer.eos_token_ids)],
            "tokenizer": build_info.bytes_digest(tokenizer.tokenizer_json or b""),
            "tools": build_info.versions(),
            "source": build_info.source_digest(),
        }
    )


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    """A configuration as canonical values: infinities and the like as text."""
    return {key: repr(to_value(item)) for key, item in value.items()}
