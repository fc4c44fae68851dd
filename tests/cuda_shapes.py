"""What several tests of CUDA tiles share: the shape of a linear layer, the limits of a target."""

from typing import Any

from sitsc.core.hardware import CudaLimits, load_target

LINEAR: dict[str, Any] = {
    "rows": 4096,
    "columns": 4096,
    "norm": False,
    "eps": 0.0,
    "offset": 0.0,
    "epilogue": "residual",
    "activation": "silu",
    "bias": False,
    "out_dtype": "bf16",
}


def limits(target: str) -> CudaLimits:
    """What a GPU target has."""
    found = load_target(target).cuda
    assert found is not None
    return found
