"""Every CUDA kernel on a GPU at real shapes, launched without Triton.

SITSC_GPU_KERNELS names the folder that `python -m tests.gpu.kernel_cases` wrote. Each case must
give the reference's answer and the same bits again through a graph, and leave counters at zero.
"""

import os
from pathlib import Path

import pytest
import torch

from sitsc.codegen.triton_source import KernelSource
from sitsc.core.kernel_meta import kernel_folder, read_kernel_meta
from sitsc.runtime import cuda_driver
from sitsc.runtime.cuda_driver import Device
from sitsc.runtime.launcher import BoundLaunch, KernelImage
from tests.gpu.hopper_cases import hopper_checks
from tests.gpu.kernel_cases import all_checks
from tests.gpu.wide_cases import wide_checks
from tests.kernel_checks import Prepared, Step

pytestmark = pytest.mark.gpu
FOLDER = os.environ.get("SITSC_GPU_KERNELS", "")
HOPPER = hopper_checks() | wide_checks()
CHECKS = all_checks() | HOPPER


@pytest.fixture(scope="module")
def device() -> Device:
    if not FOLDER or not torch.cuda.is_available():
        pytest.skip("needs a GPU, and SITSC_GPU_KERNELS")
    torch.zeros(1, device="cuda")
    return cuda_driver.open_device(torch.cuda.current_device())


def load(source: KernelSource, device: Device) -> KernelImage:
    path = Path(FOLDER) / kernel_folder(device.sm) / f"{source.key()}.cubin"
    meta = read_kernel_meta(path.with_suffix(".json").read_text(), path.name)
    return KernelImage.load(path.read_bytes(), meta, device)


def bind(prepared: Prepared, device: Device) -> list[BoundLaunch]:
    """The launches; inputs are complete, since weights are read before the dependency wait."""
    torch.cuda.synchronize()
    return [_bound(load(step.source, device), step) for step in prepared.steps]


def _bound(image: KernelImage, step: Step) -> BoundLaunch:
    """A launch, with maps of the tensors that the copy engine reads."""
    values = list(step.arguments)
    for index, (name, kind) in enumerate(image.meta.arguments):
        if kind.startswith("tensordesc"):
            tensor = values[index]
            values[index] = image.tensor_map(name, tensor, tensor.shape, tensor.stride())
    return image.bind(step.grid, values)


def run(launches: list[BoundLaunch]) -> None:
    for each in launches:
        each.launch(torch.cuda.current_stream().cuda_stream)


def results(prepared: Prepared) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    return [check.got.clone() for check in prepared.checks]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Equal bits, NaN included."""
    views = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    pairs = zip(first, second, strict=True)
    return all(
        torch.equal(a.view(views[a.element_size()]), b.view(views[b.element_size()]))
        for a, b in pairs
    )


@pytest.mark.parametrize("name", CHECKS)
def test_kernel(device, name):
    if name in HOPPER and device.sm != 90:
        pytest.skip("a kernel for sm_90")
    prepared = CHECKS[name].prepare("cuda", pdl=device.sm >= 90)
    run(bind(prepared, device))
    first = results(prepared)
    for check in prepared.checks:
        assert check.passes(), f"{check.name}: relative error {check.error():.1e}"
    for counter in prepared.zero:
        assert not counter.any()
    again = CHECKS[name].prepare("cuda", pdl=device.sm >= 90)
    launches = bind(again, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(launches)
    graph.replay()
    assert same(first, results(again)), "other bits through a graph"


@pytest.mark.parametrize(
    "name", ["8b down, 1 token", "8b down, 7 tokens", "8b decode, long", "wide 8b o, 97 tokens"]
)
def test_a_chain_overlaps_and_gives_the_same_bits_each_time(device, name):
    """Kernels that share counters, partial sums and outputs, each launched while another ends."""
    prepared = CHECKS[name].prepare("cuda", pdl=device.sm >= 90)
    launches = bind(prepared, device)
    run(launches)
    first = results(prepared)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            run(launches)
    for _ in range(20):
        graph.replay()
        assert same(first, results(prepared))
