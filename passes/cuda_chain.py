"""A decode step for tuning: which launches each node becomes, with buffers that have names.

In: the graph and sizes of a step, a provider of kernels. Out: a `Chain`. Buffers are named after
nodes and share no memory, so that launches of one schedule can stand in another.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from sitsc.core.kernels import KernelInfo, KernelProvider
from sitsc.core.plan import Launch, LayerClass, Target
from sitsc.passes.cuda_collectives import rank_buffers
from sitsc.passes.cuda_schedule import CudaScheduler
from sitsc.passes.fxutil import is_op
from sitsc.passes.schedule import StepSizes

Node = Any
Asked = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class Chain:
    """Launches by place ("group.number"), places by group, and what was asked for at a place."""

    launches: dict[str, tuple[Launch, ...]] = field(default_factory=dict)
    groups: list[tuple[tuple[int, ...], tuple[str, ...]]] = field(default_factory=list)
    asked: dict[str, Asked] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    keys: dict[str, KernelInfo] = field(default_factory=dict)


class _Listener:
    """A provider that remembers what it was asked for last."""

    def __init__(self, provider: KernelProvider) -> None:
        self.provider, self.asked = provider, None

    asked: Asked | None

    def linear(
        self, shape: dict[str, Any], tokens: int, *, parts: bool = False, **norms: Any
    ) -> KernelInfo | None:
        """Like the provider's."""
        self.asked = ("linear", dict(shape))
        return self.provider.linear(shape, tokens, parts=parts, **norms)

    def attention(self, shape: dict[str, Any], kind: str) -> tuple[KernelInfo, ...]:
        """Like the provider's."""
        sizes = ("sequences", "tokens", "context")
        self.asked = ("attention", {k: v for k, v in shape.items() if k not in sizes})
        return self.provider.attention(shape, kind)

    def make(self, template: str, **shape: Any) -> KernelInfo:
        """Like the provider's."""
        return self.provider.make(template, **shape)


class _ChainScheduler(CudaScheduler):
    """The scheduler, with names for buffers and a place for each node that launches."""

    def __init__(self, chain: Chain, listener: _Listener, *given: Any) -> None:
        self.chain, self.listener = chain, listener
        self.now, self.wanted = "", None
        self.pending: list[str] = []
        super().__init__(*given)

    wanted: Asked | None

    def asked_for(
        self, node: Node, *, parts: bool, ahead: Node | None = None
    ) -> tuple[dict[str, Any], KernelInfo | None]:
        """Like the scheduler's; what was asked for the node that is being scheduled is kept."""
        found = super().asked_for(node, parts=parts, ahead=ahead)
        if node.name == self.now:
            self.wanted = self.listener.asked
        return found

    def reset(self) -> None:
        """Forget everything that was scheduled, of the chain too."""
        super().reset()
        for part in (self.chain.launches, self.chain.groups, self.chain.asked):
            part.clear()

    def _node(self, node: Node) -> None:
        self.now, self.wanted, self.listener.asked = node.name, None, None
        before = len(self.launches)
        super()._node(node)
        launches = self.launches[before:]
        if len(launches) > 1 and _adds_parts(launches[0]):
            self._place(launches[:1])
            launches = launches[1:]
        if launches:
            place = self._place(launches)
            asked = self.wanted if is_op(node, "fused_linear") else self.listener.asked
            if asked is not None and is_op(node, "fused_linear", "paged_attention"):
                self.chain.asked[place] = asked

    def _place(self, launches: list[Launch]) -> str:
        place = f"{len(self.out.groups)}.{len(self.pending)}"
        self.pending.append(place)
        self.chain.launches[place] = tuple(launches)
        return place

    def buffer_name(self, what: str) -> str:
        """Named after the node and the use, whatever else the schedule holds."""
        name, number = f"{what}.{self.now}", 1
        while name in self.bytes:
            name, number = f"{what}.{self.now}.{number}", number + 1
        return name

    def _segment(self, name: str, layers: tuple[int, ...], nodes: list[Node]) -> None:
        self.pending = []
        super()._segment(name, layers, nodes)
        if self.pending:
            self.chain.groups.append((layers, tuple(self.pending)))


def _adds_parts(launch: Launch) -> bool:
    """Whether a launch (a norm, a sum over ranks) depends on how another place leaves its sums."""
    return launch.template in ("rms_norm", "all_reduce") and any(
        a.name == "parts_ptr" for a in launch.arguments
    )


def schedule_chain(
    graph: fx.Graph,
    step: StepSizes,
    classes: tuple[LayerClass, ...],
    target: Target,
    provider: KernelProvider,
    page_tokens: int,
    kv_pages: int,
    ranks: int = 1,
) -> Chain:
    """The decode step without sampling, of one of `ranks`. Raises UnsupportedModelError."""
    chain, listener = Chain(), _Listener(provider)
    scheduler = _ChainScheduler(
        chain, listener, graph, step, classes, target, listener, page_tokens, kv_pages, ranks
    )
    made = scheduler.run()
    chain.buffers = {buffer.name: buffer.bytes for buffer in made.buffers}
    chain.buffers |= {buffer.name: buffer.bytes for buffer in rank_buffers(ranks)}
    chain.keys = made.keys
    return chain
