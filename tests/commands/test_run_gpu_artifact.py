"""`sitsc run` on a GPU artifact without a GPU, --random-weights and --memory-limit anywhere."""

import json
from pathlib import Path

import pytest
import torch

from sitsc.commands.bench import probe
from sitsc.commands.output import size_bytes
from sitsc.core.artifact import Artifact
from sitsc.core.errors import DeviceError, OptionError, VerifyError
from tests.commands.artifact_edits import copy, edit_manifest, flip_byte
from tests.commands.command_line import call, spawn
from tests.runtime.gpu_artifacts import (
    checkpoint,
    cubins,
    few_launches,
    plan_of,
    write_gpu_artifact,
)

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def gpu_artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("gpu")
    plan = few_launches(plan_of(checkpoint(folder / "model")))
    kernels = cubins(90, folder / "kernels")
    return write_gpu_artifact(folder / "art", plan, kernels, packed=False)


@pytest.fixture(scope="module")
def unpacked(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small Llama for the CPU without its weights, which are nowhere."""
    root = copy(tiny_artifact, tmp_path_factory.mktemp("unpacked"))
    files = json.loads((root / "manifest.json").read_text())["files"]
    for name in ("weights.bin", "weights.json"):
        (root / name).unlink()
        del files[name]
    edit_manifest(root, files=files, packed=False)
    return root


@without_gpu
@pytest.mark.parametrize("extra", [(), ("--memory-limit", "80GiB"), ("--no-verify", "--json")])
def test_no_gpu_is_one_line(gpu_artifact: Artifact, extra: tuple[str, ...]):
    result = spawn("run", gpu_artifact.root, "hello", "--random-weights", *extra)
    result.refused(2, "the artifact is for h200 (sm_90)", "--target cpu")


@without_gpu
def test_the_artifact_is_checked_before_the_device(gpu_artifact: Artifact, tmp_path: Path, capfd):
    call(capfd, "run", gpu_artifact.root, "hello").refused(
        2, "holds no weights", "--weights DIR", "--random-weights"
    )
    root = copy(gpu_artifact.root, tmp_path)
    flip_byte(root / "kernels/sm_90/add.cubin", 900)
    call(capfd, "run", root, "hello", "--random-weights").refused(1, "kernel add was altered")


@without_gpu
def test_bench_checks_what_loading_does_before_it_measures(
    gpu_artifact: Artifact, tmp_path: Path, capfd
):
    root = gpu_artifact.root
    call(capfd, "bench", root, "--random-weights").refused(
        2, "the artifact is for h200 (sm_90)", "--target cpu", f"[{root.name}]"
    )
    call(capfd, "bench", root).refused(2, "holds no weights", "--weights DIR")
    altered = copy(root, tmp_path)
    flip_byte(altered / "kernels/sm_90/add.cubin", 900)
    call(capfd, "bench", altered, "--random-weights").refused(1, "kernel add was altered")


@without_gpu
def test_what_a_probe_finds_keeps_its_class_and_code(gpu_artifact: Artifact, tmp_path: Path):
    with pytest.raises(DeviceError) as found:
        probe(gpu_artifact.root, 1, ["--random-weights"])
    text = str(found.value)
    assert "the artifact is for h200 (sm_90)" in text and "Error" not in text
    altered = copy(gpu_artifact.root, tmp_path)
    flip_byte(altered / "kernels/sm_90/add.cubin", 900)
    with pytest.raises(VerifyError, match="kernel add was altered") as verified:
        probe(altered, 1, ["--random-weights"])
    assert verified.value.exit_code == 1 and verified.value.where and verified.value.hint


def test_random_weights_on_the_cpu(unpacked: Path):
    command = ("run", unpacked, "The river", "--random-weights", "--max-tokens", 5, "--json")
    made = [json.loads(spawn(*command).out) for _ in range(2)]
    assert len(made[0]["token_ids"]) == 5
    assert made[0]["token_ids"] == made[1]["token_ids"]


def test_weights_from_two_places_are_refused(
    unpacked: Path, tiny_artifact: Path, tmp_path: Path, capfd
):
    call(capfd, "run", unpacked, "hi", "--random-weights", "--weights", tmp_path).refused(
        2, "exclude each other"
    )
    call(capfd, "run", tiny_artifact, "hi", "--random-weights").refused(
        2, "holds its weights", "leave out --random-weights"
    )


def test_a_memory_limit_on_the_cpu(unpacked: Path, capfd):
    call(capfd, "run", unpacked, "hi", "--random-weights", "--memory-limit", "500000").refused(
        2, "not enough memory", "500000 bytes allowed by --memory-limit", "weights"
    )
    for text in ("none", "0", "-3GiB", "12XB"):
        call(capfd, "run", unpacked, "hi", "--memory-limit", text).refused(2, "is no size")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("1048576", 1 << 20),
        ("80GiB", 80 << 30),
        ("0.5 gib", 1 << 29),
        ("80GB", 80 * 10**9),
        ("1.5MB", 1_500_000),
        ("7 b", 7),
    ],
)
def test_sizes(text: str, count: int):
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["", " ", "GiB", "1e9", "1,5GB", "0.0", "9" * 30, "٣GB", "1 G iB"])
def test_what_is_no_size(text: str):
    with pytest.raises(OptionError, match="is no size"):
        size_bytes(text)
