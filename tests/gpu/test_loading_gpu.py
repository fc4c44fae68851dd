"""Loading on a GPU; SITSC_GPU_ARTIFACT names an artifact without weights inside."""

import gc
import os
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sitsc.core.artifact import Artifact, open_artifact
from sitsc.core.errors import MemoryPlanError
from sitsc.core.memory_budget import needed_bytes
from sitsc.core.sampling import SamplingOptions
from sitsc.core.weights import TensorSlice, WeightSpec, materialise
from sitsc.runtime import cuda_driver
from sitsc.runtime.checkpoint_weights import CheckpointFiles
from sitsc.runtime.cuda_preflight import check_kernels, gpu_room, open_gpu, preflight
from sitsc.runtime.cuda_weights import WeightLoad, random_weights
from sitsc.runtime.loader import load
from sitsc.runtime.weight_layout import WeightLayout
from sitsc.runtime.weight_reader import Lanes
from sitsc.runtime.weight_sources import checkpoint_source

pytestmark = pytest.mark.gpu
PLACE = os.environ.get("SITSC_GPU_ARTIFACT", "")
ROWS, COLS = 700, 384


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    open_gpu()


@pytest.fixture
def artifact() -> Artifact:
    if not PLACE:
        pytest.skip("needs SITSC_GPU_ARTIFACT")
    return open_artifact(PLACE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoint")
    make = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(ROWS, COLS, generator=make).to(dtype)
        for name, dtype in (
            ("q", torch.bfloat16),
            ("k", torch.float32),
            ("v", torch.float16),
            ("o", torch.bfloat16),
        )
    }
    tensors["norm"] = torch.randn(COLS, generator=make)
    save_file(tensors, out / "model.safetensors")
    return out


def specs() -> list[WeightSpec]:
    fused = tuple(TensorSlice(name, 3, 603) for name in "qkv")
    part = (TensorSlice("o", 0, ROWS),)
    return [
        WeightSpec("qkv", "weight", fused, (1800, COLS), "bfloat16", "plain", ""),
        WeightSpec(
            "norm", "weight", (TensorSlice("norm", 0, COLS),), (COLS,), "bfloat16", "plain", ""
        ),
        WeightSpec("o", "weight", part, (ROWS, COLS), "bfloat16", "plain", ""),
        WeightSpec("o8", "weight", part, (ROWS, COLS), "int8", "n16k2", ""),
    ]


@pytest.mark.parametrize("lanes", [Lanes(1, 4096), Lanes(8, 100_000), Lanes()])
def test_rows_are_placed_and_converted_on_the_way(folder: Path, lanes: Lanes):
    layout, files = WeightLayout.of(specs()), CheckpointFiles(folder)
    load = WeightLoad(layout, checkpoint_source(folder, layout), lanes=lanes)
    weights = load.start().wait()
    torch.cuda.synchronize()
    for spec in specs():
        assert torch.equal(weights[spec.name].cpu(), materialise(spec, files.rows)), spec.name
        start = weights[spec.name].untyped_storage().data_ptr()
        assert start == load.block.data_ptr()


def test_reading_goes_on_while_graphs_are_captured(folder: Path):
    """Pinned buffers are taken and filled while another thread captures."""
    layout, files = WeightLayout.of(specs()), CheckpointFiles(folder)
    source = checkpoint_source(folder, layout)
    x, stream = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
    for lanes in (Lanes(8, 3000), Lanes(3, 30_000)):
        load = WeightLoad(layout, source, lanes=lanes).start()
        graphs = []
        with torch.cuda.stream(stream):
            for _ in range(20):
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin()
                for _ in range(50):
                    x.add_(1)
                graph.capture_end()
                graphs.append(graph)
        weights = load.wait()
        torch.cuda.synchronize()
        assert torch.equal(weights["qkv"].cpu(), materialise(specs()[0], files.rows))
        graphs[-1].replay()
        torch.cuda.synchronize()


def test_random_weights_are_drawn_in_one_allocation(artifact: Artifact):
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    weights = random_weights(artifact.plan)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    print(f"{artifact.plan.memory.weights_bytes / 1e9:.2f} GB drawn in {seconds:.3f} s")
    assert seconds < 2
    assert torch.cuda.memory_allocated() - before <= artifact.plan.memory.weights_bytes + (4 << 20)
    assert len({w.untyped_storage().data_ptr() for w in weights.values()}) == 1
    for spec in artifact.plan.model.parameters[:12]:
        if spec.role == "weight" and len(spec.shape) == 2:
            deviation = weights[spec.name].float().std() * spec.shape[-1] ** 0.5
            assert 0.98 < deviation < 1.02


def test_preflight_on_this_device(artifact: Artifact):
    device, needs = open_gpu(), check_kernels(artifact)
    preflight(artifact, device, needs, gpu_room(device, None))
    before = cuda_driver.memory_info().free_bytes
    with pytest.raises(MemoryPlanError, match="allowed by --memory-limit"):
        load(artifact.root, random_weights=True, memory_limit=needed_bytes(artifact.plan) - 1)
    assert cuda_driver.memory_info().free_bytes >= before - (64 << 20)


def test_a_loaded_artifact_stays_within_its_limit_and_answers(artifact: Artifact):
    gc.collect()
    torch.cuda.empty_cache()
    free = cuda_driver.memory_info().free_bytes
    limit = needed_bytes(artifact.plan)
    session = load(artifact.root, random_weights=True, memory_limit=limit)
    answers = session.engine.generate_batch(
        [[5, 6, 7], [9] * 300], SamplingOptions(max_tokens=5, ignore_eos=True)
    )
    assert [len(answer.token_ids) for answer in answers] == [5, 5]
    used = free - cuda_driver.memory_info().free_bytes
    print(f"{used} bytes taken, {artifact.plan.memory.total_bytes} planned, limit {limit}")
    assert used <= limit
    assert {"open", "check", "device", "kernels", "graphs", "weights"} <= set(session.timeline)
    torch.cuda.set_per_process_memory_fraction(1.0)
