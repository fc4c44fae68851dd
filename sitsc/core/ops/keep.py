"""sitsc::keep: a copy that a code generator may not undo.

Put after a value that many kernels read, so that it is computed once and not for each of them.
"""

import torch
from torch import Tensor


@torch.library.custom_op("sitsc::keep", mutates_args=())
def keep(x: Tensor) -> Tensor:
    """A contiguous copy of x."""
    return x.clone(memory_format=torch.contiguous_format)


@keep.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
