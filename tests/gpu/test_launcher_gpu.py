"""Launching on a GPU without Triton; SITSC_GPU_KERNELS names what build_kernels.py wrote."""

import itertools
import os
import time
from pathlib import Path

import pytest
import torch

from sitsc.core.errors import ArtifactError, TargetError
from sitsc.core.kernel_meta import KernelMeta
from sitsc.runtime import cuda_driver
from sitsc.runtime.cuda_driver import Device
from sitsc.runtime.launcher import BoundLaunch, KernelImage
from tests.gpu.kernel_files import read_kernels

pytestmark = pytest.mark.gpu
FOLDER = os.environ.get("SITSC_GPU_KERNELS", "")


@pytest.fixture(scope="module")
def device() -> Device:
    if not FOLDER or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_KERNELS")
    torch.zeros(1, device="cuda")
    return cuda_driver.open_device(torch.cuda.current_device())


@pytest.fixture(scope="module")
def files(device: Device) -> dict[str, tuple[bytes, KernelMeta]]:
    return read_kernels(Path(FOLDER), device.sm)


@pytest.fixture(scope="module")
def images(device: Device, files: dict[str, tuple[bytes, KernelMeta]]) -> dict[str, KernelImage]:
    return {name: KernelImage.load(cubin, meta, device) for name, (cubin, meta) in files.items()}


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def run(launch: BoundLaunch) -> None:
    launch.launch(stream())
    torch.cuda.synchronize()


def test_the_device_is_described(device):
    properties = torch.cuda.get_device_properties(device.ordinal)
    assert (device.name, device.num_sms) == (properties.name, properties.multi_processor_count)
    assert device.sm == 10 * properties.major + properties.minor
    info = cuda_driver.memory_info()
    assert 0 < info.free_bytes < info.total_bytes <= device.memory_bytes
    assert device.cuda_version >= 120 and device.shared_bytes > 48 * 1024


@pytest.mark.parametrize("count", [1, 255, 257, 100_003])
def test_add(images, count):
    x, y = (torch.randn(count, device="cuda") for _ in range(2))  # each aligned to 16 bytes
    out = torch.full((count + 4,), 7.0, device="cuda")
    run(images["add"].bind((-(-count // 256),), [x, y, out, count, 1.5]))
    torch.testing.assert_close(out[:count], torch.add(y, x, alpha=1.5))
    assert (out[count:] == 7).all()


@pytest.mark.parametrize("name", ["small_matmul", "large_matmul"])
@pytest.mark.parametrize("shape", [(64, 64, 64), (1, 16, 48), (100, 208, 304)])
def test_matmul_with_tensor_cores_and_large_shared_memory(images, name, shape):
    rows, cols, depth = shape
    generator = torch.Generator("cuda").manual_seed(1)
    a = torch.randn(rows, depth, device="cuda", generator=generator).bfloat16()
    b = torch.randn(depth, cols, device="cuda", generator=generator).bfloat16()
    c = torch.empty(rows, cols, device="cuda")
    tile = images[name].meta.constants
    grid = (-(-rows // int(tile["BM"])), -(-cols // int(tile["BN"])))
    run(images[name].bind(grid, [a, b, c, rows, cols, depth]))
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-4, atol=1e-3)
    assert images["large_matmul"].meta.shared_bytes > 48 * 1024
    assert images[name].blocks_per_sm() >= 1


def chain(image: KernelImage, steps: int, count: int) -> tuple[list[BoundLaunch], torch.Tensor]:
    """`steps` launches, each reading what the one before wrote; all buffers."""
    buffers = torch.zeros(steps + 1, count, dtype=torch.int32, device="cuda")
    grid = (-(-count // 128),)
    pairs = itertools.pairwise(buffers)
    return [image.bind(grid, [x, out, count]) for x, out in pairs], buffers


@pytest.mark.parametrize("count", [128, 1 << 20])
def test_a_dependent_chain_keeps_its_order(images, count):
    launches, buffers = chain(images["step"], 20, count)
    for _ in range(20):
        buffers[1:].zero_()
        for launch in launches:
            launch.launch(stream())
        torch.cuda.synchronize()
        assert (buffers[-1] == 2**20 - 1).all()


def test_a_chain_without_overlap_gives_the_same(images):
    first = torch.zeros(128, dtype=torch.int32, device="cuda")
    out = torch.empty_like(first)
    run(images["step"].bind((1,), [first, out, 128], dependent=False))
    assert (out == 1).all()


def test_launches_are_captured_in_a_graph_and_replayed(images):
    launches, buffers = chain(images["step"], 20, 4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch.launch(stream())
    assert (buffers[-1] == 0).all()
    for start in (0, 3):
        buffers[0] = start
        graph.replay()
        torch.cuda.synchronize()
        assert (buffers[-1] == (start + 1) * 2**20 - 1).all()


def test_one_launch_goes_to_any_stream(images):
    x, y = torch.randn(2, 1024, device="cuda")
    out = torch.zeros(1024, device="cuda")
    launch = images["add"].bind((4,), [x, y, out, 1024, 2.0])
    torch.cuda.synchronize()
    for each in (torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()):
        out.zero_()
        torch.cuda.synchronize()
        launch.launch(each.cuda_stream)
        torch.cuda.synchronize()
        torch.testing.assert_close(out, 2 * x + y)


def test_tensor_descriptors(images):
    if "copy_tiles" not in images:
        pytest.skip("needs sm_90 or later")
    x = torch.randn(100, 200, device="cuda").bfloat16()
    out = torch.zeros(100, 200, device="cuda", dtype=torch.bfloat16)
    image = images["copy_tiles"]
    maps = {
        name: image.tensor_map(name, tensor, tensor.shape, tensor.stride())
        for name, tensor in (("x", x), ("out", out))
    }
    run(image.bind((4, 4), maps))
    assert torch.equal(out, x)
    with pytest.raises(ArtifactError, match="divisible by 16 bytes"):
        image.tensor_map("x", x, (100, 199), (199, 1))


def test_launching_is_cheap(images):
    launches, _ = chain(images["step"], 1, 128)
    launch, handle = launches[0], stream()
    for _ in range(100):
        launch.launch(handle)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(1000):
        launch.launch(handle)
    each_us = 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    print(f"{each_us:.2f} us a launch on the host")
    assert each_us < 50


def test_a_kernel_of_another_architecture_is_refused(files, device):
    cubin, meta = files["add"]
    wrong = Device(0, "another GPU", device.sm + 7, 1, 1, 232448, device.cuda_version)
    with pytest.raises(TargetError, match="another GPU is sm_"):
        KernelImage.load(cubin, meta, wrong)
