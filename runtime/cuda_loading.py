"""Loading an artifact on a GPU: checked first, then weights beside kernels and graphs.

In: an opened artifact of a GPU target. Out: an executor with its graphs captured. Capturing needs
the addresses of weights and not their content, so that both go on at the same time.
"""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sitsc.core import env
from sitsc.core.artifact import Artifact
from sitsc.core.errors import DeviceError, RankError
from sitsc.core.memory_budget import CUDA_RUNTIME_BYTES, TORCH_WORKSPACE_BYTES, Room
from sitsc.runtime import cuda_preflight
from sitsc.runtime.cuda_driver import Device
from sitsc.runtime.cuda_executor import CudaExecutor
from sitsc.runtime.cuda_weights import WeightLoad, random_weights, weight_load
from sitsc.runtime.load_request import LoadRequest, Timeline, weights_folder

if TYPE_CHECKING:
    from sitsc.runtime.ranks import World


class CudaLoading:
    """An artifact on its way to a GPU."""

    def __init__(
        self,
        artifact: Artifact,
        request: LoadRequest,
        timeline: Timeline,
        world: "World | None" = None,
    ) -> None:
        """Check everything, then begin with the weights. Raises SitscError before any is read."""
        self._artifact, self._world = artifact, world
        folder = weights_folder(artifact, request)
        needs = cuda_preflight.check_kernels(artifact)
        timeline.mark("check")
        device = cuda_preflight.open_for(artifact, env.local_rank())
        if world is not None:
            world.check_alike(device.name)
        room = cuda_preflight.gpu_room(device, request.memory_limit)
        cuda_preflight.preflight(artifact, device, needs, room)
        start_torch(device)
        _limit_torch(room)
        timeline.mark("device")
        self._load: WeightLoad | None = None
        with _memory_errors(device):
            if request.random_weights:
                self._weights = random_weights(artifact.plan)
            else:
                self._load = weight_load(artifact, folder, progress=request.progress).start()
                self._weights = self._load.views
        self._device = device
        timeline.mark("allocate")

    def finish(self, timeline: Timeline) -> CudaExecutor:
        """The executor, its graphs captured and its weights in place. Raises SitscError."""
        with _memory_errors(self._device):
            executor = CudaExecutor(self._artifact, self._weights, self._shared())
            timeline.mark("kernels")
            if self._world is not None:
                self._world.gather()
                timeline.mark("meet")
            executor.capture()
            timeline.mark("graphs")
            self._wait(timeline)
        timeline.mark("weights")
        if self._world is not None:  # from now on kernels of one rank wait for those of others
            if names := executor.lost_exchanges():
                what = f"rank {self._world.rank}: GPUs waited for each other in vain"
                raise RankError(f"{what} ({', '.join(names)})", hint="start the job again")
            self._world.gather()
            timeline.mark("meet")
        return executor

    def _shared(self) -> Tensor | None:
        """The arena that all ranks map, if there are several."""
        if self._world is None:
            return None
        from sitsc.runtime.shared_arena import share_arena  # noqa: PLC0415  (with ranks alone)

        world = self._world
        self._arena = share_arena(world.plan, world.rank, world.everyone)
        return self._arena.arena

    def stop(self) -> None:
        """Read no more; returns when nothing is written to the device any more."""
        if self._load is not None:
            self._load.stop()

    def _wait(self, timeline: Timeline) -> dict[str, Tensor]:
        if self._load is not None:
            self._load.wait()
            timeline.beside["weights"] = self._load.seconds
            _free_pinned()
        torch.cuda.synchronize()
        return self._weights


def start_torch(device: Device) -> None:
    """Let torch use the device. Raises DeviceError."""
    if not torch.backends.cuda.is_built():
        raise DeviceError(
            "this build of torch has no CUDA", hint="install a build of torch for CUDA"
        )
    try:
        torch.cuda.set_device(device.ordinal)
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        first = (str(error).splitlines() or ["no reason given"])[0]
        raise DeviceError(
            f"torch cannot use {device.name}: {first}",
            hint="install a build of torch for this driver",
        ) from None


def _limit_torch(room: Room) -> None:
    """Let torch use no more memory than allowed."""
    if room.limit_bytes:
        outside = CUDA_RUNTIME_BYTES - TORCH_WORKSPACE_BYTES
        share = (room.limit_bytes - outside) / room.total_bytes
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, share)))


@contextlib.contextmanager
def _memory_errors(device: Device) -> Iterator[None]:
    """The device was full although enough was free at first."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"the memory of {device.name} ran out while loading",
            hint="another process took it; end that one, or wait for it",
        ) from error


def _free_pinned() -> None:
    """Give back the pinned buffers of loading, where torch has a call for it."""
    free = getattr(torch._C, "_host_emptyCache", None)
    if free is not None:
        free()
