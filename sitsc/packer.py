"""Packing a checkpoint into an artifact: the one step that reads weights.

Also where a redundant copy of a tied weight is compared with the tensor that it copies.
"""

from collections.abc import Callable, Sequence

import torch

from sitsc.core import artifact as files
from sitsc.core.artifact import ArtifactWriter
from sitsc.core.canonical import canonical_json
from sitsc.core.errors import CheckpointError, OptionError
from sitsc.core.options import CompileOptions
from sitsc.core.packing import write_weights
from sitsc.core.plan import Plan
from sitsc.core.records import to_value
from sitsc.core.weights import WeightSpec
from sitsc.frontend.checkpoint import Checkpoint
from sitsc.frontend.config_lint import lint_tensors

_PACK_BELOW_BYTES = 2 << 30
_ROWS = 4096


def wanted(checkpoint: Checkpoint, plan: Plan, options: CompileOptions) -> bool:
    """Whether weights lie inside: as asked for, else when quantised, from GGUF or under 2 GiB."""
    if not checkpoint.has_weights:
        return False
    if options.pack is not None:
        return options.pack
    quantised = options.weights != "none" or checkpoint.format in ("gguf", "onnx")
    return quantised or plan.memory.weights_bytes < _PACK_BELOW_BYTES


def check_options(checkpoint: Checkpoint, options: CompileOptions) -> None:
    """Raises CheckpointError without weights, OptionError where they cannot lie as asked for."""
    if options.pack is not False and not checkpoint.has_weights:
        raise CheckpointError(
            "the model folder holds no weights",
            where=checkpoint.root.name,
            hint="fetch the safetensors files; --no-pack plans from config.json alone",
        )
    if options.pack is False and checkpoint.format in ("gguf", "onnx"):
        raise OptionError(
            f"--no-pack: a {checkpoint.format.upper()} file cannot be read at run time",
            hint="leave out --no-pack",
        )


def pack(
    checkpoint: Checkpoint, plan: Plan, writer: ArtifactWriter, progress: Callable[[float], None]
) -> None:
    """Stream every planned buffer into the artifact. Raises CheckpointError."""
    ranks = [plan.of_rank(rank).model.parameters for rank in range(plan.num_ranks)]
    pack_ranks(checkpoint, ranks, writer, progress)


def pack_ranks(
    checkpoint: Checkpoint,
    ranks: Sequence[tuple[WeightSpec, ...]],
    writer: ArtifactWriter,
    progress: Callable[[float], None],
) -> None:
    """Stream the buffers of every rank into files of its own. Raises CheckpointError.

    Of each tensor only the rows are read that a rank has; the files are called as
    `artifact.rank_files` says, and hold the buffers in the order given.
    """
    _check_duplicates(checkpoint)
    whole, done = max(1, sum(spec.nbytes for specs in ranks for spec in specs)), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(done / whole)

    def read(name: str, start: int, stop: int) -> torch.Tensor:
        return checkpoint.read(name, (start, stop))

    with files.disk_errors(writer.out):
        for rank, specs in enumerate(ranks):
            weights, listed = files.rank_files(rank, len(ranks))
            try:
                index = write_weights(specs, read, writer.path(weights), advance)
            except ValueError as error:
                raise CheckpointError(
                    f"a weight cannot be stored: {error}", hint="compile without --weights int8"
                ) from error
            writer.path(listed).write_text(canonical_json(to_value(index)))


def _check_duplicates(checkpoint: Checkpoint) -> None:
    """A tied weight that the file holds twice must be the same both times."""
    if checkpoint.program is not None:  # the graph reads each weight where it is
        return
    found = lint_tensors(checkpoint.config, checkpoint.tensors, checkpoint.nested)
    for copy, original in found.duplicates.items():
        rows = checkpoint.tensors[copy].shape[0]
        for start in range(0, rows, _ROWS):
            part = (start, min(rows, start + _ROWS))
            if not torch.equal(checkpoint.read(copy, part), checkpoint.read(original, part)):
                raise CheckpointError(
                    f"the config ties {copy} to {original}, but the file holds two different ones",
                    hint="set tie_word_embeddings to false if the head is its own",
                )
