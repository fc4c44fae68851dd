"""What must hold before weights are loaded on a GPU: the device, the kernels, the memory.

In: an opened artifact; then a device described by numbers. Out: nothing, or one error in one line
with a hint. Reads kernels and never weights; asks the driver only in `open_gpu` and `gpu_room`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from sitsc.core.artifact import AGAIN, Artifact, hash_file
from sitsc.core.errors import ArtifactError, DeviceError, TargetError, VerifyError
from sitsc.core.hardware import load_target, target_names
from sitsc.core.kernel_meta import kernel_folder, read_kernel_meta
from sitsc.core.memory_budget import CUDA_RUNTIME_BYTES, Room
from sitsc.core.memory_changes import check_memory
from sitsc.core.plan import Launch, Plan
from sitsc.runtime import cuda_driver
from sitsc.runtime.cuda_driver import Device
from sitsc.runtime.kernel_parameters import check_layout


@dataclass(frozen=True, slots=True)
class KernelNeeds:
    """What the kernels of an artifact ask of a device; `cuda_version` 13.3 is 133."""

    sm: int
    cuda_version: int
    shared_bytes: int
    num_kernels: int


def target_sm(plan: Plan) -> int:
    """Compute capability that a plan is for (90). Raises TargetError for a plan of no GPU."""
    try:
        return int(plan.target.isa.removeprefix("sm_"))
    except ValueError:
        raise TargetError(f"{plan.target.name} ({plan.target.isa}) is no GPU target") from None


# --- kernels --------------------------------------------------------------------------------------


def check_kernels(artifact: Artifact) -> KernelNeeds:
    """Every kernel that the plan launches is there, unaltered, sane and for the plan's target.

    Raises ArtifactError or VerifyError naming the kernel.
    """
    sm, found = target_sm(artifact.plan), set()
    version = shared = 0
    for launch in _launches(artifact.plan):
        if launch.kind != "kernel" or launch.kernel in found:
            continue
        found.add(launch.kernel)
        layout_version, shared_bytes = _check_kernel(artifact, launch, sm)
        version, shared = max(version, layout_version), max(shared, shared_bytes)
    return KernelNeeds(sm, version, shared, len(found))


def _launches(plan: Plan) -> Iterator[Launch]:
    for regime in plan.regimes:
        for group in regime.groups:
            yield from group.launches


def _check_kernel(artifact: Artifact, launch: Launch, sm: int) -> tuple[int, int]:
    """CUDA version and shared memory that one kernel asks for."""
    stem, where = f"{kernel_folder(sm)}/{launch.kernel}", artifact.root.name
    for name in (f"{stem}.cubin", f"{stem}.json"):
        if not artifact.has(name):
            raise ArtifactError(
                f"kernel {launch.template} is missing: {name}", where=where, hint=AGAIN
            )
        if hash_file(artifact.root / name) != artifact.manifest.files[name]:
            raise VerifyError(
                f"kernel {launch.template} was altered: {name}", where=where, hint=AGAIN
            )
    try:
        meta = read_kernel_meta(artifact.text(f"{stem}.json"), stem)
        layout = check_layout(artifact.file(f"{stem}.cubin").read_bytes(), meta)
    except ArtifactError as error:
        what = f"kernel {launch.template} cannot be used: {error.what}"
        raise ArtifactError(what, where=where, hint=error.hint or AGAIN) from None
    if meta.sm != sm:
        what = f"kernel {launch.template} is for sm_{meta.sm}, the plan for sm_{sm}"
        raise ArtifactError(what, where=where, hint=AGAIN)
    return layout.cuda_version, meta.shared_bytes


# --- device ---------------------------------------------------------------------------------------


def open_gpu(ordinal: int = 0) -> Device:
    """The GPU, its context current on this thread. Raises DeviceError."""
    return cuda_driver.open_device(ordinal)


def open_for(artifact: Artifact, ordinal: int = 0) -> Device:
    """The same; what is wrong is told with what the artifact wants. Raises DeviceError."""
    try:
        return open_gpu(ordinal)
    except DeviceError as error:
        raise no_gpu(error, artifact) from None


def no_gpu(error: DeviceError, artifact: Artifact) -> DeviceError:
    """The error of a machine that cannot run GPU artifacts at all, with what the artifact wants."""
    target = artifact.plan.target
    what = f"{error.what.rstrip('.')}; the artifact is for {target.name} ({target.isa})"
    return DeviceError(what, where=artifact.root.name, hint=error.hint)


def check_device(artifact: Artifact, device: Device, needs: KernelNeeds) -> None:
    """The device can run the kernels. Raises TargetError, or DeviceError for its driver."""
    plan, where = artifact.plan, artifact.root.name
    if device.sm != needs.sm:
        raise TargetError(
            f"the artifact is for {plan.target.name} (sm_{needs.sm}), {device.name} is"
            f" sm_{device.sm}",
            where=where,
            hint=_compile_for(device),
        )
    if device.cuda_version <= 0:
        raise DeviceError(
            "the driver does not say which CUDA version it runs, the kernels were made with CUDA"
            f" {_dotted(needs.cuda_version)}",
            where=where,
            hint=f"install a driver for CUDA {needs.cuda_version // 10} or newer",
        )
    # A driver runs what any compiler of its own major version made.
    if device.cuda_version // 10 < needs.cuda_version // 10:
        have, need = _dotted(device.cuda_version), _dotted(needs.cuda_version)
        raise DeviceError(
            f"the driver is too old: it runs CUDA {have}, the kernels were made with {need}",
            where=where,
            hint=f"install a driver for CUDA {needs.cuda_version // 10} or newer",
        )
    if needs.shared_bytes > device.shared_bytes:
        raise TargetError(
            f"a kernel needs {needs.shared_bytes} bytes of shared memory, {device.name} has"
            f" {device.shared_bytes}",
            where=where,
            hint=_compile_for(device),
        )


def _compile_for(device: Device) -> str:
    """The command that makes an artifact for a device."""
    targets = [load_target(name).target for name in target_names()]
    fit = [target for target in targets if target.isa == f"sm_{device.sm}"]
    if not fit:
        known = ", ".join(f"{t.name} ({t.isa})" for t in targets if t.isa.startswith("sm_"))
        return f"no target is for sm_{device.sm}; there are {known}"
    nearest = min(fit, key=lambda target: abs(target.memory_bytes - device.memory_bytes))
    return f"sitsc compile MODEL --target {nearest.name}"


def _dotted(version: int) -> str:
    return f"{version // 10}.{version % 10}"


# --- memory ---------------------------------------------------------------------------------------


def gpu_room(device: Device, limit_bytes: int | None) -> Room:
    """What may be used of a device whose context is current; our own context counts as free."""
    info = cuda_driver.memory_info()
    return room_of(device.memory_bytes, info.free_bytes, limit_bytes)


def room_of(total_bytes: int, free_bytes: int, limit_bytes: int | None) -> Room:
    """The room on a device where, of what is not free, as much as a context takes is our own."""
    own = min(total_bytes - free_bytes, CUDA_RUNTIME_BYTES)
    return Room(total_bytes, free_bytes + own, limit_bytes or 0)


def preflight(artifact: Artifact, device: Device, needs: KernelNeeds, room: Room) -> None:
    """All checks of an artifact against a device, by numbers alone."""
    check_device(artifact, device, needs)
    check_memory(artifact.plan, room, device.name, artifact.root.name)


def check_here(artifact: Artifact, memory_limit: int | None, ordinal: int = 0) -> Device:
    """All checks of an artifact on this machine, as loading makes them; the device.

    Raises ArtifactError, VerifyError, DeviceError, TargetError or MemoryPlanError.
    """
    needs = check_kernels(artifact)
    device = open_for(artifact, ordinal)
    preflight(artifact, device, needs, gpu_room(device, memory_limit))
    return device
