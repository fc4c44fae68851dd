"""What steps over several ranks have in common: messages on their way, and who is lost.

In: tensors to send, failures of the network. Out: the same messages, sent; a `RankError` that names
the rank.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from sitsc.core.errors import ExecutionError, RankError
from sitsc.runtime.ranks import World

_VERDICT_S = 12.0
_Step = TypeVar("_Step")


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


def answer_of(step: _Step, owed: deque[_Step], receive: Callable[[_Step], Tensor]) -> Tensor:
    """What comes for a step, after what comes for interrupted ones that nobody collected.

    `owed` are the steps whose answers have not come yet, in the order in which they come.
    """
    while True:
        first = owed[0]
        answer = receive(first)
        owed.popleft()
        if first is step:
            return answer


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
