"""Checks before loading on a GPU, by numbers and real cubins, on a machine without one."""

from dataclasses import replace
from pathlib import Path

import pytest

from sitsc.core.artifact import Artifact, open_artifact, sign
from sitsc.core.errors import (
    ArtifactError,
    DeviceError,
    MemoryPlanError,
    SitscError,
    TargetError,
    VerifyError,
)
from sitsc.core.memory_budget import Room
from sitsc.runtime import cuda_driver
from sitsc.runtime.cuda_driver import Device, MemoryInfo
from sitsc.runtime.cuda_preflight import (
    KernelNeeds,
    check_device,
    check_here,
    check_kernels,
    no_gpu,
    preflight,
    target_sm,
)
from tests.commands.artifact_edits import copy, flip_byte
from tests.runtime.gpu_artifacts import (
    checkpoint,
    cubins,
    few_launches,
    plan_of,
    write_gpu_artifact,
)

GIB = 1 << 30
H200 = Device(0, "NVIDIA H200", 90, 132, 140 * GIB, 232448, 130)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("preflight")
    plan = few_launches(plan_of(checkpoint(folder / "model")))
    return write_gpu_artifact(folder / "art", plan, cubins(90, folder / "kernels"))


@pytest.fixture(scope="module")
def needs(artifact: Artifact) -> KernelNeeds:
    return check_kernels(artifact)


def test_what_the_kernels_need(needs: KernelNeeds):
    assert (needs.sm, needs.num_kernels) == (90, 2)
    assert needs.cuda_version >= 120 and needs.shared_bytes > 48 * 1024


def test_a_fitting_device_passes(artifact: Artifact, needs: KernelNeeds):
    preflight(artifact, H200, needs, Room(140 * GIB, 139 * GIB))


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        (
            {"sm": 80, "name": "NVIDIA A100"},
            TargetError,
            ("for h200 (sm_90)", "NVIDIA A100 is sm_80", "--target a100"),
        ),
        ({"sm": 75, "name": "Tesla T4"}, TargetError, ("sm_75", "no target is for", "l40s")),
        ({"cuda_version": 114}, DeviceError, ("runs CUDA 11.4", "made with 1", "install a driver")),
        (
            {"cuda_version": 0},
            DeviceError,
            ("does not say which CUDA version", "made with CUDA 1", "install a driver for CUDA 1"),
        ),
        ({"shared_bytes": 49152}, TargetError, ("shared memory", "49152")),
    ],
)
def test_devices_that_cannot_run_it(artifact, needs, change, kind, parts):
    with pytest.raises(kind) as caught:
        check_device(artifact, replace(H200, **change), needs)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert "[art]" in text and "\n" not in text


def test_the_nearest_target_of_an_architecture_is_named(artifact, needs):
    a = replace(needs, sm=80)
    for size, name in ((80, "h100"), (141, "h200")):
        with pytest.raises(TargetError, match=f"--target {name}"):
            check_device(artifact, replace(H200, memory_bytes=size * GIB), a)


def test_too_little_memory(artifact, needs):
    with pytest.raises(MemoryPlanError, match="not enough memory"):
        preflight(artifact, H200, needs, Room(140 * GIB, GIB // 2))


def test_no_gpu_says_what_the_artifact_wants(artifact):
    error = no_gpu(DeviceError("no NVIDIA driver", hint="install it"), artifact)
    assert str(error) == ("no NVIDIA driver; the artifact is for h200 (sm_90) [art] — install it")


def test_a_machine_is_checked_as_for_loading(artifact, tmp_path: Path, monkeypatch):
    asked: list[int] = []

    def opened(ordinal: int) -> Device:
        asked.append(ordinal)
        return H200

    monkeypatch.setattr(cuda_driver, "open_device", opened)
    monkeypatch.setattr(cuda_driver, "memory_info", lambda: MemoryInfo(100 * GIB, 140 * GIB))
    assert check_here(artifact, None, 3) == H200 and asked == [3]
    with pytest.raises(MemoryPlanError, match="allowed by --memory-limit"):
        check_here(artifact, 1000)
    monkeypatch.setattr(cuda_driver, "memory_info", lambda: MemoryInfo(0, 140 * GIB))
    with pytest.raises(MemoryPlanError, match="free on NVIDIA H200"):
        check_here(artifact, None)
    root, asked[:] = copy(artifact.root, tmp_path), []
    flip_byte(root / "kernels/sm_90/add.cubin", 900)
    with pytest.raises(VerifyError, match="kernel add was altered"):
        check_here(open_artifact(root), None)
    assert not asked

    def none(ordinal: int) -> Device:
        raise DeviceError("no NVIDIA driver", hint="install it")

    monkeypatch.setattr(cuda_driver, "open_device", none)
    with pytest.raises(DeviceError, match="no NVIDIA driver; the artifact is for h200"):
        check_here(artifact, None)


def refused(root: Path, kind: type[SitscError], *parts: str) -> None:
    with pytest.raises(kind) as caught:
        check_kernels(open_artifact(root))
    assert all(part in str(caught.value) for part in parts), caught.value


def test_altered_and_missing_kernels_are_named(artifact: Artifact, tmp_path: Path):
    root = copy(artifact.root, tmp_path)
    cubin = root / "kernels/sm_90/add.cubin"
    flip_byte(cubin, 900)
    refused(root, VerifyError, "kernel add was altered: kernels/sm_90/add.cubin")
    cubin.unlink()
    refused(root, VerifyError, "add.cubin", "is missing")  # opening an artifact finds it first
    sign(root)
    refused(root, ArtifactError, "kernel add is missing: kernels/sm_90/add.cubin", "again")


def test_a_cubin_that_is_none_or_another_is_told(artifact: Artifact, tmp_path: Path):
    root = copy(artifact.root, tmp_path)
    folder = root / "kernels/sm_90"
    good = (folder / "add.cubin").read_bytes()
    (folder / "add.cubin").write_bytes(good[: len(good) // 2])
    sign(root)
    refused(root, ArtifactError, "kernel add cannot be used", "not a usable cubin")
    (folder / "add.cubin").write_bytes((folder / "large_matmul.cubin").read_bytes())
    sign(root)
    refused(root, ArtifactError, "kernel add cannot be used")


def test_a_kernel_of_another_architecture(artifact: Artifact, tmp_path: Path):
    root = copy(artifact.root, tmp_path)
    for name, (cubin, meta) in cubins(80, tmp_path / "kernels").items():
        if name == "add":
            (root / "kernels/sm_90/add.cubin").write_bytes(cubin)
            (root / "kernels/sm_90/add.json").write_text(meta.text())
    sign(root)
    refused(root, ArtifactError, "kernel add is for sm_80, the plan for sm_90")


def test_a_plan_of_no_gpu(artifact: Artifact):
    plan = artifact.plan
    assert target_sm(plan) == 90
    with pytest.raises(TargetError, match="no GPU target"):
        target_sm(replace(plan, target=replace(plan.target, isa="x86-64-v3")))
