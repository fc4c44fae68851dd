"""The kernels of the CPU as ctypes functions, compiled once and shared with what is compiled."""

from collections.abc import Iterator

import pytest

from sitsc.codegen import cpu
from sitsc.codegen.cpu_ctypes import CpuKernels
from sitsc.codegen.cpu_kernels import ISAS


@pytest.fixture(scope="session")
def library() -> CpuKernels:
    return CpuKernels(cpu.libraries() / "kernels.so")


@pytest.fixture(params=[isa.name for isa in ISAS])
def kernels(library: CpuKernels, request: pytest.FixtureRequest) -> Iterator[CpuKernels]:
    if not library.select_isa(request.param):
        pytest.skip(f"this CPU does not run {request.param}")
    assert library.isa() == request.param
    yield library
    library.library.sitsc_cpu_set_workspace(None, 0)
    library.select_isa(None)
