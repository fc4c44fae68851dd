"""A launch with tensor maps that the executor binds from arguments of a plan, layer by layer."""

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from sitsc.core.plan import Argument, Launch, LaunchGroup
from sitsc.runtime.cuda_bound import BoundGroups
from sitsc.runtime.cuda_driver import Device
from sitsc.runtime.cuda_memory import CudaMemory
from sitsc.runtime.launcher import KernelImage
from tests.gpu.hopper_cases import hopper_checks
from tests.gpu.test_kernels_gpu import bind, device, load, run
from tests.kernel_checks import Prepared, Step

__all__ = ["device"]
pytestmark = pytest.mark.gpu
LAYERS = (0, 1, 2)
SIZES = ("num_sequences", "table_width")
BY_LAYER = ("kv_map", "out_ptr")


@dataclass(frozen=True)
class Buffers:
    """Tensors by name as the executor's memory finds them."""

    tensors: dict[str, Any]

    def address(self, argument: Argument, layer: int) -> int:
        return self.tensors[argument.buffer].data_ptr() + layer * argument.layer_stride


def _argument(name: str, kind: str, tensors: dict[str, Any]) -> Argument:
    if name in SIZES:
        return Argument(name, "size", name, kind, ())
    tensor = tensors[name][0] if name in BY_LAYER else tensors[name]
    stride = tensor.nbytes if name in BY_LAYER else 0
    source = "kv" if name == "kv_map" else "arena"
    return Argument(name, source, name, "bfloat16", tuple(tensor.shape), layer_stride=stride)


def in_layers(image: KernelImage, prepared: Prepared) -> Tensor:
    """Outputs [layers, tokens, .] over the pages of a check, V doubled from layer to layer."""
    step: Step = prepared.steps[1]
    names = [name for name, _ in step.source.arguments]
    tensors: dict[str, Any] = dict(zip(names, step.arguments, strict=True))
    pool = prepared.checks[1].got
    pools = torch.stack([pool] * len(LAYERS))
    for layer in LAYERS:
        pools[layer, :, 1] *= 2**layer
    tensors["kv_map"] = pools.view(len(LAYERS), -1, pool.shape[-1])
    tensors["out_ptr"] = torch.stack([torch.full_like(tensors["out_ptr"], 7.0)] * len(LAYERS))
    arguments = tuple(_argument(name, kind, tensors) for name, kind in step.source.arguments)
    grid = step.grid[:1]
    launch = Launch("kernel", "", "", {}, grid, arguments, (), 0, True, 0, 0, 0.0)
    sizes = {name: int(tensors[name]) for name in SIZES}
    memory = cast(CudaMemory, Buffers(tensors))
    groups = BoundGroups([LaunchGroup("", LAYERS, (launch,))], lambda _: image, memory, sizes)
    torch.cuda.synchronize()
    groups.run(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return tensors["out_ptr"]


def test_every_layer_attends_to_its_own_pages(device: Device):
    if device.sm != 90:
        pytest.skip("a kernel for sm_90")
    prepared = hopper_checks()["hopper 8b, ragged"].prepare("cuda", pdl=True)
    run(bind(prepared, device))
    found = in_layers(load(prepared.steps[1].source, device), prepared)
    tokens = prepared.steps[1].arguments[0].shape[0] - 3  # the rest is padding
    want = prepared.checks[0].got[:tokens]
    for layer in LAYERS:
        assert torch.equal(found[layer, :tokens], want * 2**layer)
    assert (found[:, tokens:] == 7).all()
