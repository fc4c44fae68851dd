"""From where each weight of a plan is read: pieces of files, or made by the general rule.

In: a layout and a packed weights file or a checkpoint folder. Out: what `FileReader` needs, and the
weights that need more than copying and converting. Reads headers only; errors come before weights.
"""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError, CheckpointError
from sitsc.core.weights import ReadRows, TensorSlice, WeightSpec
from sitsc.runtime.checkpoint_weights import CheckpointFiles, TensorPlace
from sitsc.runtime.weight_layout import Placed, WeightLayout
from sitsc.runtime.weight_reader import Piece


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Pieces of files for most weights; `made` are those that `materialise` makes from rows."""

    files: tuple[Path, ...]
    pieces: tuple[Piece, ...]
    made: tuple[Placed, ...]
    rows: ReadRows


def packed_source(artifact: Artifact, layout: WeightLayout) -> WeightSource:
    """The weights file inside an artifact. Raises ArtifactError when a weight is not in it."""
    name = artifact.weights
    index, size = artifact.stored_weights(), artifact.manifest.files[name].bytes
    pieces = []
    for place in layout.places:
        spec = place.spec
        stored = index.get(spec.name)
        if stored is None or stored.bytes != spec.nbytes or stored.offset + spec.nbytes > size:
            raise ArtifactError(f"weight {spec.name} is not in {name}", where=artifact.root.name)
        pieces.append(Piece(0, stored.offset, spec.nbytes, place.offset))
    return WeightSource((artifact.file(name),), tuple(pieces), (), _no_rows)


def checkpoint_source(folder: Path, layout: WeightLayout) -> WeightSource:
    """The checkpoint that an unpacked artifact was compiled from. Raises CheckpointError."""
    files = CheckpointFiles(folder)
    pieces: list[Piece] = []
    made: list[Placed] = []
    for place in layout.places:
        found = _pieces(place, files)
        if found is None:
            made.append(place)
        else:
            pieces += found
    return WeightSource(tuple(files.paths), tuple(pieces), tuple(made), files.rows)


def _pieces(place: Placed, files: CheckpointFiles) -> list[Piece] | None:
    """The rows of a weight where copying and converting makes it; None where it does not."""
    spec, at, found = place.spec, place.offset, []
    if spec.role == "constant":
        return None
    copied = spec.role == "weight" and spec.format == "plain" and spec.dtype != "int8"
    for source in spec.sources:
        if source.zeros:
            copied = False
            continue
        tensor = files.place(source.tensor)
        if spec.role == "weight":
            _check_shape(spec, source, tensor)
        copied = copied and bool(tensor.dtype) and not source.part
        if copied:
            start = tensor.start + source.start * tensor.row_bytes
            count = (source.stop - source.start) * tensor.row_bytes
            types = () if tensor.dtype == spec.dtype else (tensor.dtype, spec.dtype)
            found.append(Piece(tensor.file, start, count, at, *types))
            at += found[-1].placed_bytes
    if copied and at != place.offset + spec.nbytes:
        raise CheckpointError(f"the rows of {spec.name} are not as many as planned")
    return found if copied else None


def _check_shape(spec: WeightSpec, source: TensorSlice, tensor: TensorPlace) -> None:
    """Raises CheckpointError for a tensor that cannot be the one that was compiled."""
    rows, *columns = spec.source_shape(source)
    if not tensor.shape or tensor.shape[0] < rows or tensor.shape[1:] != tuple(columns):
        raise CheckpointError(
            f"tensor {source.tensor} has the shape {list(tensor.shape)}, not as planned",
            hint="another checkpoint?",
        )


def _no_rows(tensor: str, start: int, stop: int) -> Tensor:
    raise ArtifactError(f"{tensor} rows {start}..{stop} are not in this artifact")
