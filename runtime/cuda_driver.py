"""A thin layer over the CUDA driver: devices, memory, loaded kernels, launches.

In: numbers and bytes. Out: typed results, or one error in one line. Only this module calls
cuda-bindings, which is imported when a device is first used. Compiles nothing, allocates nothing.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

from sitsc.core.errors import DeviceError, TargetError

DRIVER_CARVEOUT = -1
_NO_DEVICE = 100
_SHARED_WITHOUT_ASKING = 48 * 1024
_HINTS = {
    2: "free memory on the device, or compile with a smaller budget",
    100: "run on a machine with an NVIDIA GPU, or compile for --target cpu",
    35: "update the NVIDIA driver",
    200: "the driver may be too old for this cubin: update it",
    209: "compile for the architecture of this GPU",
    700: "a kernel launched before this one failed; start the process again",
    719: "a kernel launched before this one failed; start the process again",
    803: "driver and driver library are of different versions: restart the machine",
}


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU: compute capability (90), CUDA version of its driver (13.0: 130), sizes in bytes."""

    ordinal: int
    name: str
    sm: int
    num_sms: int
    memory_bytes: int
    shared_bytes: int
    cuda_version: int


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Free and whole memory of the current device."""

    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel ready to launch in the current context; `library` keeps it loaded."""

    name: str
    function: Any
    library: Any


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """How a kernel is launched: blocks in the grid, threads a block, and its attributes."""

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    cluster: int = 1
    dependent: bool = False
    cooperative: bool = False


@cache
def bindings() -> Any:
    """The driver functions, initialised. Raises DeviceError when there are none."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DeviceError(
            f"cuda-bindings cannot be imported: {error}", hint="pip install sitsc[cuda]"
        ) from None
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:  # cuda-bindings raises what its loader of libraries raises
        raise DeviceError(
            f"no NVIDIA driver: {str(error).splitlines()[0]}",
            hint="install the driver, or compile for --target cpu",
        ) from None
    if int(status) == _NO_DEVICE:
        raise DeviceError("there is no GPU that CUDA can use", hint=_HINTS[_NO_DEVICE])
    _check(driver, int(status), "start CUDA")
    return driver


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function by name; its result (a tuple when several). Raises DeviceError."""
    driver = bindings()
    status, *results = getattr(driver, name)(*arguments)
    _check(driver, int(status), name)
    return results[0] if len(results) == 1 else tuple(results)


def _check(driver: Any, status: int, what: str) -> None:
    if status != 0:
        known = {int(code): code.name for code in driver.CUresult}
        reason = known.get(status, f"error {status}")
        raise DeviceError(f"{what} failed: {reason}", hint=_HINTS.get(status, ""))


def open_device(ordinal: int = 0) -> Device:
    """The device, its primary context (which torch uses too) current on this thread."""
    count = call("cuDeviceGetCount")
    if not 0 <= ordinal < count:
        raise DeviceError(f"there is no GPU {ordinal}", hint=f"this machine shows {count}")
    handle = call("cuDeviceGet", ordinal)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", handle))
    attribute = bindings().CUdevice_attribute

    def get(name: str) -> int:
        return call(
            "cuDeviceGetAttribute", getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), handle
        )

    major, minor = get("COMPUTE_CAPABILITY_MAJOR"), get("COMPUTE_CAPABILITY_MINOR")
    name = call("cuDeviceGetName", 256, handle)
    return Device(
        ordinal=ordinal,
        name=name.split(b"\0")[0].decode(),
        sm=10 * major + minor,
        num_sms=get("MULTIPROCESSOR_COUNT"),
        memory_bytes=call("cuDeviceTotalMem", handle),
        shared_bytes=get("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        cuda_version=call("cuDriverGetVersion") // 10,
    )


def ignore_captures() -> None:
    """Let this thread allocate and copy while another thread captures a graph."""
    relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    call("cuThreadExchangeStreamCaptureMode", relaxed)


def memory_info() -> MemoryInfo:
    """Free and whole memory of the device whose context is current."""
    free, total = call("cuMemGetInfo")
    return MemoryInfo(free, total)


def require(device: Device, sm: int, cuda_version: int, shared_bytes: int = 0) -> None:
    """Raises TargetError or DeviceError when a kernel built so cannot run on the device."""
    if device.sm != sm:
        raise TargetError(
            f"the kernels are for sm_{sm}, {device.name} is sm_{device.sm}",
            hint="compile for this GPU: sitsc compile … --target",
        )
    # A driver runs what any compiler of its own major version made.
    if device.cuda_version // 10 < cuda_version // 10:
        have, need = _dotted(device.cuda_version), _dotted(cuda_version)
        raise DeviceError(
            f"the driver is too old: it runs CUDA {have}, the kernels need {need}",
            hint="update the NVIDIA driver",
        )
    if shared_bytes > device.shared_bytes:
        raise TargetError(
            f"a kernel needs {shared_bytes} bytes of shared memory,"
            f" {device.name} has {device.shared_bytes}",
            hint="compile for this GPU",
        )


def _dotted(version: int) -> str:
    return f"{version // 10}.{version % 10}"


def load_kernel(cubin: bytes, name: str, shared_bytes: int, carveout: int) -> LoadedKernel:
    """Load one kernel now, not at its first launch, so that it can be captured in a graph.

    `carveout` is the share of on-chip memory that shared memory should get, in percent; -1
    leaves it to the driver. Raises DeviceError, also for bytes that the driver refuses.
    """
    try:
        library = call("cuLibraryLoadData", cubin, [], [], 0, [], [], 0)
        kernel = call("cuLibraryGetKernel", library, name.encode())
        function = call("cuKernelGetFunction", kernel)
    except DeviceError as error:
        raise DeviceError(f"kernel {name} is not loaded: {error.what}", hint=error.hint) from None
    attribute = bindings().CUfunction_attribute
    if shared_bytes > _SHARED_WITHOUT_ASKING:
        most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, most, shared_bytes)
    if carveout != DRIVER_CARVEOUT:
        share = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        call("cuFuncSetAttribute", function, share, carveout)
    return LoadedKernel(name, function, library)


def blocks_per_sm(kernel: LoadedKernel, threads: int, shared_bytes: int) -> int:
    """How many blocks of a kernel one multiprocessor holds at a time."""
    name = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    return call(name, kernel.function, threads, shared_bytes)


class LaunchConfig:
    """Grid, block, attributes and stream of a launch; many launches of one grid share it."""

    __slots__ = ("_stream", "cluster", "config")

    def __init__(self, shape: LaunchShape) -> None:
        self.config, self.cluster = _config(bindings(), shape), shape.cluster
        self._stream = 0

    def on(self, stream: int) -> Any:
        """The driver's description, for a stream given by its handle."""
        if stream != self._stream:
            self.config.hStream = bindings().CUstream(stream)
            self._stream = stream
        return self.config

    def regrid(self, grid: tuple[int, int, int]) -> None:
        """Another number of blocks for all launches to come."""
        x, self.config.gridDimY, self.config.gridDimZ = grid
        self.config.gridDimX = x * self.cluster


class PreparedLaunch:
    """A launch with everything fixed but the stream: one driver call each time."""

    __slots__ = ("_config", "_function", "_launch", "_name", "_parameters")

    def __init__(self, kernel: LoadedKernel, config: LaunchConfig, parameters: int) -> None:
        """`parameters` is the address of the kernel's array of pointers to its arguments."""
        self._launch = bindings().cuLaunchKernelEx
        self._function, self._name = kernel.function, kernel.name
        self._config, self._parameters = config, parameters

    def submit(self, stream: int) -> None:
        """Launch on a stream (its handle). Raises DeviceError."""
        config = self._config.on(stream)
        (status,) = self._launch(config, self._function, self._parameters, 0)
        if status != 0:
            _check(bindings(), int(status), f"launch of {self._name}")


def _config(driver: Any, shape: LaunchShape) -> Any:
    """The driver's description of a launch."""
    config = driver.CUlaunchConfig()
    x, config.gridDimY, config.gridDimZ = shape.grid
    config.gridDimX = x * shape.cluster
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes = shape.shared_bytes
    attributes = []

    def add(name: str) -> Any:
        attribute = driver.CUlaunchAttribute()
        attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        attributes.append(attribute)
        return attribute.value

    if shape.dependent:
        add("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
    if shape.cooperative:
        add("COOPERATIVE").cooperative = 1
    if shape.cluster > 1:
        cluster = add("CLUSTER_DIMENSION").clusterDim
        cluster.x, cluster.y, cluster.z = shape.cluster, 1, 1
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config
