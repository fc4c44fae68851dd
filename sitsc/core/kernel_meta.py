"""What a compiled kernel needs to be launched, stored as JSON beside its cubin.

Written by the compiler, read by the launcher; neither needs the other. Sizes in bytes.
"""

import json
from dataclasses import dataclass
from typing import Any

from sitsc.core.canonical import canonical_json
from sitsc.core.errors import ArtifactError, PlanError
from sitsc.core.records import from_value, to_value


@dataclass(frozen=True, slots=True)
class KernelMeta:
    """One kernel of one architecture.

    `function` is its name in the cubin, `arch` what the assembler was asked for ("sm_90a"),
    `arguments` the run-time (name, type) pairs in order; those in `aligned` must be divisible by
    16. A launch needs `scratch_bytes` of global memory for each block of the grid; `tensor_maps`
    describes the tensor descriptors among the arguments, in order.
    """

    key: str
    template: str
    function: str
    sm: int
    arch: str
    arguments: tuple[tuple[str, str], ...]
    aligned: tuple[str, ...]
    constants: dict[str, int | float | str | bool]
    num_warps: int
    num_stages: int
    num_ctas: int
    shared_bytes: int
    scratch_bytes: int
    scratch_align: int
    profile_bytes: int
    profile_align: int
    tensor_maps: tuple[dict[str, Any], ...]
    pdl: bool
    cooperative: bool
    registers: int
    spill_bytes: int
    stack_bytes: int
    triton: str
    ptxas: str

    def text(self) -> str:
        """The canonical text."""
        return canonical_json(to_value(self))


def read_kernel_meta(text: str | bytes, where: str = "kernel") -> KernelMeta:
    """The metadata in a JSON text. Raises ArtifactError naming `where`."""
    try:
        return from_value(KernelMeta, json.loads(text), where)
    except (ValueError, RecursionError, PlanError) as error:
        what = f"kernel metadata cannot be read: {error}"
        raise ArtifactError(what, where=where, hint="compile again") from None


def kernel_folder(sm: int) -> str:
    """The folder of an artifact that holds the kernels of one architecture."""
    return f"kernels/sm_{sm}"
