"""Weights of ranks: packed into files of their own, or read from the checkpoint by parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sitsc.core.artifact import ArtifactWriter, StoredWeight, rank_files
from sitsc.core.canonical import canonical_json
from sitsc.core.parallel import Partition
from sitsc.core.records import from_value, to_value
from sitsc.core.weights import WeightSpec, materialise
from sitsc.frontend.checkpoint import open_checkpoint
from sitsc.frontend.safe_files import parse_json_object
from sitsc.models.presets import preset
from sitsc.packer import pack_ranks
from sitsc.passes import CPU, FUSED
from sitsc.passes.base import PassContext
from sitsc.passes.for_rank import stage_passes
from sitsc.passes.runner import run_passes
from sitsc.passes.shard_table import weights_of_rank
from sitsc.runtime.checkpoint_weights import CheckpointFiles
from sitsc.runtime.weight_layout import WeightLayout
from sitsc.runtime.weight_sources import checkpoint_source

CONTEXT = PassContext("float32", "none", "float32", 16, "cpu")
RANKS = 2


@pytest.fixture(scope="module")
def graphs(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The graph of two ranks with packed and with plain weights."""
    traced, found = request.getfixturevalue("traced"), {}
    for name, passes in (("packed", CPU), ("plain", FUSED)):
        module = traced(preset("tiny-llama"), "float32")
        run_passes(module, stage_passes(passes, Partition(tp=RANKS), 0, (0, 2)), CONTEXT)
        found[name] = module.graph
    return found


def _whole(folder: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def test_every_rank_has_a_file_of_its_part(
    graphs: dict[str, Any], tiny_checkpoint: Path, tmp_path: Path
):
    checkpoint, whole = open_checkpoint(tiny_checkpoint), _whole(tiny_checkpoint)
    ranks = [weights_of_rank(graphs["packed"], rank) for rank in range(RANKS)]
    shares: list[float] = []
    with ArtifactWriter(tmp_path / "art") as writer:
        pack_ranks(checkpoint, ranks, writer, shares.append)
        for rank, specs in enumerate(ranks):
            weights, listed = rank_files(rank, RANKS)
            raw = writer.path(weights).read_bytes()
            value: Any = parse_json_object(b'{"w":' + writer.path(listed).read_bytes() + b"}", "w")
            index = from_value(tuple[StoredWeight, ...], value["w"], "weights")
            for spec, stored in zip(specs, index, strict=True):
                wanted = materialise(spec, lambda name, a, b: whole[name][a:b])
                found = raw[stored.offset : stored.offset + stored.bytes]
                assert found == wanted.numpy().tobytes(), spec.name
    assert shares[-1] == 1.0


def test_parts_make_up_the_whole(graphs: dict[str, Any], tiny_checkpoint: Path):
    whole = _whole(tiny_checkpoint)
    parts: dict[str, list[Tensor]] = {}
    for rank in range(RANKS):
        for spec in weights_of_rank(graphs["plain"], rank):
            made = materialise(spec, lambda name, a, b: whole[name][a:b])
            parts.setdefault(spec.name, []).append(made)
    for name, dim in (("embed_tokens", 0), ("layers.0.self_attn.o_proj", 1), ("norm", None)):
        key = f"model.{name}.weight"
        found = parts[key][0] if dim is None else torch.cat(parts[key], dim)
        assert torch.equal(found, whole[key]), key


def test_a_rank_reads_its_part_of_a_checkpoint(graphs: dict[str, Any], tiny_checkpoint: Path):
    """Rows are pieces of files, and no more bytes than the rank has; columns are made."""
    files = CheckpointFiles(tiny_checkpoint)
    for rank in range(RANKS):
        layout = WeightLayout.of(weights_of_rank(graphs["plain"], rank))
        source = checkpoint_source(tiny_checkpoint, layout)
        made = {place.spec.name for place in source.made if place.spec.role == "weight"}
        assert {name.split(".")[-2] for name in made} == {"o_proj", "down_proj"}
        rows = sum(p.spec.nbytes for p in layout.places if p.spec.name not in made)
        constants = sum(p.spec.nbytes for p in layout.places if p.spec.role == "constant")
        assert sum(piece.placed_bytes for piece in source.pieces) == rows - constants
        for place in layout.places:
            materialise(place.spec, files.rows)


def test_slices_of_a_rank_are_written_and_read_as_they_are(graphs: dict[str, Any]):
    for graph in graphs.values():
        for rank in range(RANKS):
            for spec in weights_of_rank(graph, rank):
                value = parse_json_object(canonical_json(to_value(spec)).encode(), "spec")
                assert from_value(WeightSpec, value, "spec") == spec
