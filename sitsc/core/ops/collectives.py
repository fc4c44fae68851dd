"""sitsc::all_reduce, sitsc::all_gather: what the ranks of a group compute together.

Sums are taken in the order of the ranks, in fp32, and rounded once: every rank gets the same bits.
With torch.distributed running, pieces travel through the process group that `use_group` has named
(the whole world by default); alone, a rank is the only one of its group.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

TP = "tp"
_GROUPS: dict[str, Any] = {}
_WAITING: list[Callable[[], AbstractContextManager[None]]] = [nullcontext]


def use_group(name: str, group: Any) -> None:
    """Let collectives of the group `name` travel through a process group; None: the world."""
    _GROUPS[name] = group


def use_waiting(waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """Let collectives wait for other ranks inside of `waiting()`."""
    _WAITING[0] = waiting


def sum_of_ranks(parts: Sequence[Tensor], residual: Tensor | None) -> Tensor:
    """residual + parts[0] + parts[1] + … in fp32, in the dtype of the residual, else the parts."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    if residual is None:
        return total.to(parts[0].dtype)
    return (residual.float() + total).to(residual.dtype)


def _pieces(x: Tensor, group: str) -> list[Tensor]:
    """The tensors of all ranks of a group, in order; they have the same shape."""
    if not (dist.is_available() and dist.is_initialized()):
        return [x]
    known = _GROUPS.get(group)
    found = [torch.empty_like(x) for _ in range(dist.get_world_size(known))]
    with _WAITING[0]():
        dist.all_gather(found, x, group=known)
    return found


def all_reduce(x: Tensor, residual: Tensor | None, group: str) -> Tensor:
    """residual + the sum of x over the ranks of `group`; residual is the same on all of them."""
    parts = _pieces(x.contiguous(), group)
    return sum_of_ranks(parts, residual).clone(memory_format=torch.contiguous_format)


def _all_reduce_fake(x: Tensor, residual: Tensor | None, group: str) -> Tensor:
    like = x if residual is None else residual
    return torch.empty_like(x, dtype=like.dtype, memory_format=torch.contiguous_format)


def all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """x of every one of the `size` ranks of `group`, one after another along `dim`.

    A rank that runs alone repeats its own.
    """
    parts = _pieces(x.contiguous(), group)
    return torch.cat(parts if len(parts) == size else parts * size, dim)


def _all_gather_fake(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * size
    return x.new_empty(shape)


# Defined by hand: the first call of a torch custom_op imports torch's compiler, seconds of a start.
_LIBRARY = torch.library.Library("sitsc", "FRAGMENT")
_LIBRARY.define("all_reduce(Tensor x, Tensor? residual, str group) -> Tensor")
_LIBRARY.define("all_gather(Tensor x, SymInt dim, SymInt size, str group) -> Tensor")
for _function, _fake in ((all_reduce, _all_reduce_fake), (all_gather, _all_gather_fake)):
    _LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sitsc::{_function.__name__}", _fake, lib=_LIBRARY)
