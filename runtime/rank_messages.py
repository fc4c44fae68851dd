"""What steps over several ranks have in common: messages on their way, and who is lost.

In: tensors to send, failures of the network. Out: the same messages, sent; a `RankError` that names
the rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sitsc.core.errors import ExecutionError, RankError
from sitsc.runtime.ranks import World

_VERDICT_S = 12.0


@dataclass(slots=True)
class Messages:
    """Messages on their way: what they are made of must live until they have left."""

    works: list[Any] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def add(self, tensor: Tensor, to: int, tag: int) -> None:
        """Begin to send."""
        self.tensors.append(tensor)
        self.works.append(dist.isend(tensor, to, tag=tag))

    def wait(self) -> None:
        """Until all have left."""
        for work in self.works:
            work.wait()


@contextmanager
def together(world: World) -> Iterator[None]:
    """A failure of the network becomes the name of the rank that is lost."""
    try:
        yield
    except (RuntimeError, ExecutionError) as error:
        raise lost(world, error) from error


def lost(world: World, error: Exception) -> RankError:
    """Wait for the watch to say who is lost; it ends the process when it knows."""
    what = world.watch.verdict(_VERDICT_S)
    first = str(error).splitlines()[0] if str(error) else type(error).__name__
    return RankError(what or f"rank {world.rank}: {first}", hint="see what it wrote")
