"""The ranks of a plan as processes: how they meet, agree, and notice that one is gone.

In: the environment that `torchrun` or `sitsc run --nproc` gives (RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), and the plan. Out: a `World` with this rank's place and process groups. Every rank
leaves a sign of life in the store; who misses one for too long ends the job and names the rank.
"""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sitsc.core.errors import OptionError, RankError
from sitsc.core.ops.collectives import TP, use_group, use_waiting
from sitsc.core.plan import Plan
from sitsc.runtime.rank_watch import Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BACKEND = "gloo"
_MEETING, _COMPARING = timedelta(seconds=60), timedelta(seconds=5)
_EVER = timedelta(days=365)  # a step may be long in coming: the watch tells who is lost
_NAME = 128  # bytes of a name that ranks compare
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """Where this process stands: its stage, its number in it, and how many there are of each."""

    rank: int
    stage: int
    tp_rank: int
    tp: int
    pp: int
    watch: Watch
    plan: Plan  # of all ranks

    @property
    def everyone(self) -> "ProcessGroup":
        """The group of all ranks."""
        import torch.distributed as dist  # noqa: PLC0415  (only with ranks)

        assert dist.group.WORLD is not None
        return dist.group.WORLD

    @property
    def before(self) -> int:
        """The rank that sends what this one computes with; the first stage hears from rank 0."""
        return self.rank - self.tp if self.stage else 0

    @property
    def after(self) -> int:
        """The rank of the next stage that this one sends to."""
        return self.rank + self.tp

    def gather(self) -> None:
        """Wait until all ranks are here."""
        import torch  # noqa: PLC0415  (with torch.distributed)
        import torch.distributed as dist  # noqa: PLC0415

        with self.watch.waiting():
            dist.all_reduce(torch.zeros(1))

    def check_alike(self, what: str) -> None:
        """Raises RankError, on every rank, when `what` (a GPU's name) is not the same on all."""
        import torch  # noqa: PLC0415  (with torch.distributed)
        import torch.distributed as dist  # noqa: PLC0415

        mine = torch.frombuffer(
            bytearray(what.encode()[:_NAME].ljust(_NAME, b"\0")), dtype=torch.uint8
        )
        found = [torch.empty_like(mine) for _ in range(self.tp * self.pp)]
        with self.watch.waiting():
            dist.all_gather(found, mine)
        names = [bytes(one.tolist()).rstrip(b"\0").decode(errors="replace") for one in found]
        for other, name in enumerate(names):
            if name != names[0]:
                raise RankError(
                    f"rank {other} has a {name}, rank 0 a {names[0]}",
                    hint="one artifact runs on GPUs of one type",
                )

    @property
    def is_last(self) -> bool:
        """Whether this is a rank of the last stage."""
        return self.stage == self.pp - 1

    @property
    def last(self) -> int:
        """The rank that has logits for rank 0."""
        return (self.pp - 1) * self.tp


def join(plan: Plan) -> World:
    """Meet the other ranks. Raises RankError when they are not those of this plan."""
    rank, size = place_of(plan)
    import torch.distributed as dist  # noqa: PLC0415  (not needed by one rank)
    from torch._C._distributed_c10d import PrefixStore  # noqa: PLC0415

    # The rank that holds the store first: the others wait until it is there.
    held = _store(rank)
    try:
        held.set(f"joined/{rank}", "yes")
        _meet(held, rank, size)
        _agree(held, plan, rank, size)
        own = _store(rank, client=True)
        group = PrefixStore("group", held)
        dist.init_process_group(BACKEND, None, _EVER, size, rank, group)
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"rank {rank} of {size} cannot meet the others: {str(error).splitlines()[0]}",
            hint="see what the others wrote",
        ) from error
    place, tp = plan.ranks[rank], plan.parallel.tp
    groups = [dist.new_group(list(range(s * tp, (s + 1) * tp))) for s in range(size // tp)]
    use_group(TP, groups[place.program])
    watch = Watch(own, rank, size, _end)
    use_waiting(watch.waiting)
    watch.start()
    return World(rank, place.program, place.shard, tp, size // tp, watch, plan)


def place_of(plan: Plan) -> tuple[int, int]:
    """Rank and size out of the environment. Raises RankError or OptionError."""
    missing = [name for name in _NEEDED if name not in os.environ]
    if missing:
        raise OptionError(
            f"the artifact is for {plan.num_ranks} ranks, and this process is none of them",
            hint=f"--nproc {plan.num_ranks}, or torchrun",
        )
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        raise OptionError("RANK and WORLD_SIZE are no numbers", hint="start by torchrun") from None
    if size != plan.num_ranks:
        raise RankError(
            f"{size} ranks were started, the artifact is for {plan.num_ranks}",
            hint=f"start {plan.num_ranks}",
        )
    if not 0 <= rank < size:
        raise OptionError(f"RANK {rank} of {size} ranks", hint=f"0 to {size - 1}")
    return rank, size


def _store(rank: int, *, client: bool = False) -> Any:
    """A connection to the store that all ranks share; the first of rank 0 holds it.

    Under torchrun its agent may hold it.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # noqa: PLC0415

    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    holds = rank == 0 and not client and not agent
    try:
        made = TCPStore(host, int(port), is_master=holds, timeout=_MEETING, wait_for_workers=False)
    except (RuntimeError, OSError, ValueError) as error:
        hint = "is another program on this port? choose another" if holds else "is rank 0 there?"
        raise RankError(f"rank {rank} cannot use {host}:{port}", hint=hint) from error
    return PrefixStore(f"sitsc/{again}", made)


def _meet(store: Any, rank: int, size: int) -> None:
    """Wait for all ranks to join. Raises RankError naming those that do not."""
    keys = [f"joined/{other}" for other in range(size)]
    try:
        store.wait(keys, _MEETING)
    except RuntimeError as error:
        absent = [str(other) for other in range(size) if not store.check([keys[other]])]
        raise RankError(
            f"rank {rank} waited for rank {', '.join(absent)} in vain",
            hint=f"start all {size} ranks within {_MEETING.seconds} s",
        ) from error


def _agree(store: Any, plan: Plan, rank: int, size: int) -> None:
    """Raises RankError, on every rank, when one has another plan than rank 0."""
    mine = plan.sha256()
    store.set(f"plan/{rank}", mine)
    plans = [store.get(f"plan/{other}").decode() for other in range(size)]
    store.set(f"compared/{rank}", mine)
    if rank == 0 and len(set(plans)) > 1:  # the store must outlive the others' look at it
        with suppress(RuntimeError):
            store.wait([f"compared/{other}" for other in range(size)], _COMPARING)
    for other, theirs in enumerate(plans):
        if theirs != plans[0]:
            raise RankError(
                f"rank {other} has another plan ({theirs[:12]}) than rank 0 ({plans[0][:12]})",
                hint="give all ranks the same artifact",
            )


def _end(what: str) -> None:
    """End the process at once: the main thread may wait for the lost rank for ever."""
    print(f"sitsc: {what}", file=sys.stderr, flush=True)
    os._exit(1)
