"""Planned weights from files and at random, in one block: here on the CPU, bit for bit."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from sitsc.core.artifact import open_artifact
from sitsc.core.errors import ArtifactError, CheckpointError
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan
from sitsc.core.weights import DTYPES, TensorSlice, WeightSpec, materialise
from sitsc.runtime import cpu_weights
from sitsc.runtime.checkpoint_weights import CheckpointFiles, read_checkpoint
from sitsc.runtime.cuda_weights import WeightLoad, random_weights, weight_load
from sitsc.runtime.memory import read_weights
from sitsc.runtime.random_rows import RandomRows
from sitsc.runtime.weight_layout import WeightLayout
from sitsc.runtime.weight_reader import Lanes
from sitsc.runtime.weight_sources import checkpoint_source
from tests.runtime.gpu_artifacts import checkpoint, plan_of, write_gpu_artifact

LANES = Lanes(4, 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return checkpoint(folder / "model", shard_bytes=60_000)


@pytest.fixture(scope="module")
def plan(model: Path) -> Plan:
    return plan_of(model)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert list(one) == list(other)
    return all(torch.equal(one[name], other[name]) for name in one)


def test_the_plan_is_worth_testing(plan: Plan, model: Path):
    """Fused rows, a constant, several files."""
    assert any(len(spec.sources) == 3 for spec in plan.model.parameters)
    assert any(spec.role == "constant" for spec in plan.model.parameters)
    assert len(CheckpointFiles(model).paths) > 2
    layout = WeightLayout.of(plan.model.parameters)
    assert layout.nbytes == plan.memory.weights_bytes


def test_packed_weights_are_one_read(folder: Path, plan: Plan):
    artifact = write_gpu_artifact(folder / "packed", plan, {})
    shares: list[float] = []
    load = weight_load(artifact, None, "cpu", progress=shares.append, lanes=LANES)
    weights = load.start().wait()
    assert same(weights, read_weights(artifact))
    assert shares == sorted(shares) and 0.99 < shares[-1] <= 1.0
    starts = {view.untyped_storage().data_ptr() for view in weights.values()}
    assert starts == {load.block.data_ptr()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_a_checkpoint_is_placed_and_converted(folder: Path, plan: Plan, dtype: str):
    source = checkpoint(folder / dtype, dtype, shard_bytes=60_000)
    artifact = write_gpu_artifact(folder / f"art-{dtype}", plan, {}, packed=False)
    weights = weight_load(artifact, source, "cpu", lanes=LANES).start().wait()
    assert same(weights, read_checkpoint(artifact, source, lambda share: None))
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16, torch.float32}


def test_what_is_not_copied_is_made(model: Path):
    """Quantised, packed, transposed and scale buffers, beside a plain one."""
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, cols = CheckpointFiles(model).place(name).shape
    whole = (TensorSlice(name, 0, rows),)
    specs = [
        WeightSpec("plain", "weight", whole, (rows, cols), "bfloat16", "plain", ""),
        WeightSpec("packed", "weight", whole, (rows, cols), "bfloat16", "n16k2", ""),
        WeightSpec("int8", "weight", whole, (rows, cols), "int8", "n16k2", ""),
        WeightSpec("scale", "scale", whole, (rows,), "float32", "plain", ""),
        WeightSpec(
            "even",
            "weight",
            (TensorSlice("model.norm.weight", 0, cols, "even"),),
            (cols // 2,),
            "bfloat16",
            "plain",
            "",
        ),
    ]
    layout, files = WeightLayout.of(specs), CheckpointFiles(model)
    source = checkpoint_source(model, layout)
    assert {place.spec.name for place in source.made} >= {"packed", "int8", "scale"}
    weights = WeightLoad(layout, source, "cpu", lanes=LANES).start().wait()
    for spec in specs[:4]:
        assert torch.equal(weights[spec.name], materialise(spec, files.rows)), spec.name


def test_wrong_checkpoints_are_refused_before_anything_is_read(folder: Path, plan: Plan):
    artifact = write_gpu_artifact(folder / "unpacked", plan, {}, packed=False)
    source = checkpoint(folder / "wrong")
    path = source / "model.safetensors"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])

    def write(entries: dict) -> None:
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])

    name = "model.layers.0.mlp.up_proj.weight"
    renamed = {key.replace(name, "other"): value for key, value in header.items()}
    write(renamed)
    with pytest.raises(CheckpointError, match=f"no tensor {name}"):
        weight_load(artifact, source, "cpu")
    turned = dict(header)
    turned[name] = header[name] | {"shape": header[name]["shape"][::-1]}
    write(turned)
    with pytest.raises(CheckpointError, match="not as planned"):
        weight_load(artifact, source, "cpu")
    path.write_bytes(raw[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        weight_load(artifact, source, "cpu")


def test_a_file_that_shrinks_while_it_is_read(folder: Path, plan: Plan):
    artifact = write_gpu_artifact(folder / "shrinks", plan, {})
    load = weight_load(artifact, None, "cpu", lanes=LANES)
    with (artifact.root / "weights.bin").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ArtifactError, match=r"weights\.bin has become shorter"):
        load.start().wait()


def test_an_index_that_names_too_little_is_refused(folder: Path, plan: Plan):
    root = folder / "index"
    shutil.copytree(write_gpu_artifact(folder / "for-index", plan, {}).root, root)
    index = json.loads((root / "weights.json").read_text())
    (root / "weights.json").write_text(json.dumps(index[1:]))
    artifact = open_artifact(folder / "for-index")
    object.__setattr__(artifact, "root", root)
    with pytest.raises(ArtifactError, match=r"is not in weights\.bin"):
        weight_load(artifact, None, "cpu")


def test_random_weights_keep_activations_of_order_one(plan: Plan):
    weights = random_weights(plan, 1, device="cpu")
    assert same(weights, random_weights(plan, 1, device="cpu"))
    for spec in plan.model.parameters:
        weight = weights[spec.name].float()
        if spec.role == "constant":
            assert torch.equal(weights[spec.name], materialise(spec, RandomRows(()).read))
        elif len(spec.shape) == 1:
            assert abs(weight.mean() - 1) < 0.1
        else:
            assert 0.9 < weight.std() * spec.shape[-1] ** 0.5 < 1.1
    other = random_weights(plan, 2, device="cpu")
    assert not torch.equal(other["lm_head.weight"], weights["lm_head.weight"])


def test_random_rows_do_not_depend_on_how_they_are_asked_for(plan: Plan):
    rows, name = RandomRows(plan.model.parameters), "model.embed_tokens.weight"
    whole = rows.read(name, 0, 200)
    assert torch.equal(whole[13:150], rows.read(name, 13, 150))


def test_random_int8_weights_and_scales_agree(tmp_path: Path):
    model = checkpoint(tmp_path / "m", "float32")
    plan = plan_of(model, CompileOptions(dtype="float32", weights="int8", max_context=128))
    weights = cpu_weights.random_weights(plan)
    kinds = {(spec.role, spec.dtype) for spec in plan.model.parameters}
    assert {("weight", "int8"), ("scale", "float32")} <= kinds
    for spec in plan.model.parameters:
        assert weights[spec.name].dtype == DTYPES[spec.dtype]
        if spec.role == "scale":
            assert weights[spec.name].max() * 127 < 6 / 8
            assert (weights[spec.name][: spec.shape[-1]] > 0).all()
