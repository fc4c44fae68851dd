"""Launching without a GPU: layouts against real cubins, parameter buffers, and what is refused."""

import ctypes
import dataclasses
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.errors import ArtifactError, DeviceError, TargetError
from sitsc.core.kernel_meta import KernelMeta
from sitsc.runtime import cuda_driver
from sitsc.runtime.kernel_parameters import (
    ParameterBuffer,
    TensorMap,
    check_layout,
    parameter_types,
)
from sitsc.runtime.launcher import whole_grid
from tests import cuda_kernels

H200 = cuda_driver.Device(0, "NVIDIA H200", 90, 132, 150 << 30, 232448, 130)
KERNELS: dict[str, tuple[bytes, KernelMeta]] = {}


@pytest.fixture(autouse=True, scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> None:
    KERNELS.update(cuda_kernels.compile_all(90, tmp_path_factory.mktemp("kernels")))


def buffer(name: str, values, scratch: int = 0) -> ParameterBuffer:
    cubin, meta = KERNELS[name]
    return ParameterBuffer(check_layout(cubin, meta), meta, values, scratch)


@pytest.mark.parametrize("sm", [80, 90, 100])
def test_metadata_and_cubin_agree_on_every_kernel(sm, tmp_path):
    for cubin, meta in cuda_kernels.compile_all(sm, tmp_path).values():
        kernel = check_layout(cubin, meta)
        assert len(kernel.parameters) == len(parameter_types(meta))
        assert kernel.num_threads == 32 * meta.num_warps


def test_parameters_lie_where_the_cubin_wants_them():
    packed = buffer("add", [16, 32, 48, 1000, 0.5], scratch=64)
    assert packed.data() == struct.pack("<QQQifQQ", 16, 32, 48, 1000, 0.5, 64, 0)
    # A 64-bit number after pointers, and the two trailing scratch pointers.
    assert buffer("step", (16, 32, 2**40)).data() == struct.pack("<QQqQQ", 16, 32, 2**40, 0, 0)


def test_the_driver_finds_every_parameter_by_its_pointer():
    packed = buffer("add", [16, 32, 48, -7, 2.5])
    pointers = (ctypes.c_void_p * 7).from_address(packed.address)
    parts = [(0, "<Q", 16), (1, "<Q", 32), (3, "<i", -7), (4, "<f", 2.5), (6, "<Q", 0)]
    for index, form, value in parts:
        at = pointers[index]
        assert at is not None
        data = ctypes.string_at(at, struct.calcsize(form))
        assert struct.unpack(form, data) == (value,)


def test_tensors_and_names_are_taken():
    x, y, out = (torch.zeros(64) for _ in range(3))
    by_order = buffer("add", [x, y, out, 64, 1.0]).data()
    named = {"scale": 1.0, "count": 64, "out_ptr": out, "y_ptr": y.data_ptr(), "x_ptr": x}
    assert buffer("add", named).data() == by_order
    assert struct.unpack_from("<QQQ", by_order) == (x.data_ptr(), y.data_ptr(), out.data_ptr())


@settings(deadline=None)
@given(
    pointers=st.lists(st.integers(0, 2**60 - 1), min_size=3, max_size=3),
    count=st.integers(-(2**31), 2**31 - 1),
    scale=st.floats(width=32),
)
def test_all_values_of_a_type_are_packed(pointers, count, scale):
    aligned = [16 * pointer for pointer in pointers]
    data = buffer("add", [*aligned, count, scale]).data()
    assert data == struct.pack("<QQQifQQ", *aligned, count, scale, 0, 0)


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([16, 16, 16, 2**31, 1.0], "2147483648 is no i32"),
        ([16, 16, 16, 1.5, 1.0], "1.5 is no i32"),
        ([16, 16, 16, 1, "one"], "'one' is no fp32"),
        ([16, 16, 16, 1, 1e300], "is no fp32"),
        ([-16, 16, 16, 1, 1.0], r"-16 is no \*fp32"),
        ([None, 16, 16, 1, 1.0], r"None is no \*fp32"),
        ([16, 8, 16, 1, 1.0], "y_ptr is 8, not divisible by 16"),
        ([16, 16, 16, 1], "4 values for 5 arguments"),
        ({"x_ptr": 16}, "do not match: count, out_ptr, scale, y_ptr"),
    ],
)
def test_values_that_do_not_fit_are_named(values, what):
    with pytest.raises(ArtifactError, match=what) as caught:
        buffer("add", values)
    assert "kernel add" in str(caught.value)


def test_tensor_descriptors_are_a_map_sizes_and_strides():
    maps = [TensorMap(bytes([n]) * 128, (100, 200), (200, 1)) for n in (1, 2)]
    packed = buffer("copy_tiles", maps)
    data = packed.data()
    cubin, meta = KERNELS["copy_tiles"]
    places = [parameter.offset for parameter in check_layout(cubin, meta).parameters]
    assert data[places[5] : places[5] + 128] == bytes([2]) * 128
    assert struct.unpack_from("<ii", data, places[6]) == (100, 200)
    assert struct.unpack_from("<qq", data, places[8]) == (200, 1)
    for wrong in (16, TensorMap(bytes(128), (1,), (1,)), TensorMap(bytes(4), (1, 1), (1, 1))):
        with pytest.raises(ArtifactError, match="cannot be launched"):
            buffer("copy_tiles", [maps[0], wrong])


ADD_ARGUMENTS = cuda_kernels.add().arguments


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"arguments": ADD_ARGUMENTS[:-1]}, r"arguments of \[8, 8, 8, 4, 8, 8\] bytes"),
        ({"arguments": (*ADD_ARGUMENTS[:3], ("count", "i64"), ("scale", "fp32"))}, "bytes, the"),
        ({"arguments": (*ADD_ARGUMENTS[:4], ("scale", "fp7"))}, "unknown type 'fp7'"),
        ({"function": "subtract"}, "kernel subtract .* the cubin holds add"),
        ({"num_warps": 8}, "8 warps, the cubin wants 128 threads"),
    ],
)
def test_metadata_of_another_kernel_is_refused(change, what):
    cubin, meta = KERNELS["add"]
    with pytest.raises(ArtifactError, match=what):
        check_layout(cubin, dataclasses.replace(meta, **change))


def test_another_architecture_is_refused():
    cubin, meta = KERNELS["add"]
    with pytest.raises(TargetError, match=r"cubin is for sm_90, its metadata for sm_80"):
        check_layout(cubin, dataclasses.replace(meta, sm=80))
    cuda_driver.require(H200, 90, 129)
    with pytest.raises(TargetError, match="kernels are for sm_80, NVIDIA H200 is sm_90"):
        cuda_driver.require(H200, 80, 129)


def test_drivers_run_kernels_of_their_own_major_version():
    old = dataclasses.replace(H200, cuda_version=124)
    cuda_driver.require(old, 90, 129)
    with pytest.raises(DeviceError, match=r"runs CUDA 12.4, the kernels need 13.3.*update"):
        cuda_driver.require(old, 90, 133)


def test_shared_memory_of_the_device_is_checked():
    with pytest.raises(TargetError, match="300000 bytes of shared memory, NVIDIA H200 has 232448"):
        cuda_driver.require(H200, 90, 129, 300_000)


@pytest.mark.parametrize("grid", [(), (0,), (1, 0), (-1,), (1, 65536), (1, 1, 65536), (1, 1, 1, 1)])
def test_grids_outside_the_limits_are_refused(grid):
    with pytest.raises(ArtifactError, match="cannot have the grid"):
        whole_grid(grid, KERNELS["add"][1])
    assert whole_grid((5, 2), KERNELS["add"][1]) == (5, 2, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what happens without a GPU")
def test_without_a_gpu_the_error_is_one_line():
    with pytest.raises(DeviceError) as caught:
        cuda_driver.open_device()
    assert "\n" not in str(caught.value) and caught.value.hint


def test_a_launch_is_described_to_the_driver():
    driver = pytest.importorskip("cuda.bindings.driver")
    shape = cuda_driver.LaunchShape((6, 5, 4), 128, 50_000, cluster=2, dependent=True)
    config = cuda_driver._config(driver, shape)
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (12, 5, 4)
    assert (config.blockDimX, config.blockDimY, config.sharedMemBytes) == (128, 1, 50_000)
    names = driver.CUlaunchAttributeID
    found = {attribute.id: attribute.value for attribute in config.attrs}
    dependent = found[names.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION]
    assert dependent.programmaticStreamSerializationAllowed == 1
    cluster = found[names.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim
    assert (cluster.x, cluster.y, cluster.z) == (2, 1, 1) and config.numAttrs == 2


def test_nothing_that_compiles_is_imported():
    code = (
        "import sys, sitsc.runtime.launcher; print({'triton', 'torch', 'cuda'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_what_has_a_pointer_need_not_be_a_tensor():
    place = SimpleNamespace(data_ptr=lambda: 4096)
    assert buffer("step", [place, place, 1]).data()[:16] == struct.pack("<QQ", 4096, 4096)
