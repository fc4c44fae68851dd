"""An artifact as an ONNX model: the graph that it keeps, with its weights.

Runs where only artifacts are served, with the package onnx besides. Nothing is written unless all
of the graph can be.
"""

from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import helper
from torch import Tensor

from sitsc.core.artifact import WEIGHTS, Artifact, check_files
from sitsc.core.errors import ArtifactError
from sitsc.core.reference import FILE, read_reference
from sitsc.core.weights import DTYPES, WeightSpec
from sitsc.export.moe_form import DOMAIN
from sitsc.export.onnx_builder import OPSET
from sitsc.export.onnx_graph import GraphWriter, Written
from sitsc.export.onnx_stored import ReadStored
from sitsc.export.onnx_write import OUTSIDE_BYTES, check_new, write_model

_IR_VERSION = 8  # the first with functions: what opset 18 came with


def write_onnx(
    artifact: Artifact,
    out: Path,
    read: ReadStored | None,
    progress: Callable[[float], None],
    outside_bytes: int = OUTSIDE_BYTES,
) -> list[Path]:
    """Write the model; `read` gives the weights of an artifact that does not hold them.

    Returns the files. Raises ArtifactError, VerifyError or UnsupportedModelError.
    """
    check_new(out)
    if artifact.plan.stages:
        raise ArtifactError(
            f"no graph of an artifact for {artifact.plan.num_ranks} ranks is the whole model",
            where=artifact.root.name,
            hint="compile it for one rank",
        )
    if not artifact.has(FILE):
        raise ArtifactError(
            "the artifact holds no graph",
            where=artifact.root.name,
            hint="compile it again with this version",
        )
    check_files(artifact)
    reference = read_reference(artifact.json(FILE))
    stored = read or packed_reader(artifact)
    written = GraphWriter(reference, artifact.plan, stored).write()
    promises = list(written.builder.promises.values())
    return write_model(model_of(artifact, written), promises, out, progress, outside_bytes)


def model_of(artifact: Artifact, written: Written) -> onnx.ModelProto:
    """The model without weights."""
    builder, name = written.builder, artifact.plan.model.architecture
    constants = list(builder.constants.values())
    graph = helper.make_graph(builder.nodes, name, written.inputs, written.outputs, constants)
    domains = [("", OPSET)] + ([(DOMAIN, 1)] if builder.functions else [])
    model = helper.make_model(
        graph,
        functions=list(builder.functions.values()),
        opset_imports=[helper.make_opsetid(*domain) for domain in domains],
        ir_version=_IR_VERSION,
        producer_name="sitsc",
        producer_version=artifact.manifest.built_with.get("sitsc", ""),
    )
    if artifact.plan.tokens.max_context:
        entry = model.metadata_props.add()
        entry.key, entry.value = "max_context", str(artifact.plan.tokens.max_context)
    return model


def packed_reader(artifact: Artifact) -> ReadStored:
    """Buffers of the weights file inside an artifact. Raises ArtifactError without one."""
    if not artifact.manifest.packed:
        raise ArtifactError(
            "the weights lie outside of the artifact",
            where=artifact.root.name,
            hint="name their folder with --weights",
        )
    index, path = artifact.stored_weights(), artifact.file(WEIGHTS)

    def read(spec: WeightSpec) -> Tensor:
        place = index.get(spec.name)
        if place is None or place.bytes != spec.nbytes:
            raise ArtifactError(f"weight {spec.name} is not in {WEIGHTS}", where=artifact.root.name)
        return _buffer(path, place.offset, spec)

    return read


def _buffer(path: Path, offset: int, spec: WeightSpec) -> Tensor:
    import torch  # noqa: PLC0415

    data = bytearray(spec.nbytes)
    with path.open("rb") as file:
        file.seek(offset)
        if file.readinto(data) != spec.nbytes:
            raise ArtifactError(f"{path.name} became shorter", hint="copy or compile it again")
    if not data:
        return torch.empty(spec.stored_shape, dtype=DTYPES[spec.dtype])
    return torch.frombuffer(data, dtype=DTYPES[spec.dtype]).reshape(spec.stored_shape)
