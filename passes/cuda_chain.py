"""A decode step for tuning: which launches each node becomes, with buffers that have names.

In: the graph and sizes of a step, a provider of kernels. Out: a `Chain`. Buffers are named after
nodes and share no memory, so that launches of one schedule can stand in another.
"""

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from sitsc.core.kernels import KernelInfo, KernelProvider
from sitsc.core.plan import Launch, LayerClass, Target
from sitsc.core.weights import DTYPES
from sitsc.passes.cuda_refs import Ref
from sitsc.passes.cuda_schedule import CudaScheduler
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

    def linear(self, shape: dict[str, Any], tokens: int) -> KernelInfo | None:
        """Like the provider's."""
        self.asked = ("linear", dict(shape))
        return self.provider.linear(shape, tokens)

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
        super().__init__(*given)
        self.chain, self.listener = chain, listener
        self.now = ""
        self.pending: list[str] = []

    def _node(self, node: Node, repeated: bool) -> list[Launch]:
        self.now, self.listener.asked = node.name, None
        launches = super()._node(node, repeated)
        if launches:
            place = f"{len(self.out.groups)}.{len(self.pending)}"
            self.pending.append(place)
            self.chain.launches[place] = tuple(launches)
            if self.listener.asked is not None:
                self.chain.asked[place] = self.listener.asked
        return launches

    def _new(self, node: Node, name: str | None = None) -> Ref:
        return super()._new(node, name or node.name)

    def _temporary(self, name: str, count: int, dtype: str) -> Ref:
        ref = Ref("arena", f"{name}.{self.now}", dtype, 0, count)
        self.bytes[ref.buffer] = count * DTYPES[dtype].itemsize
        self._touch(ref)
        return ref

    def _segments(self) -> list[tuple[str, tuple[int, ...], list[Node]]]:
        """The segments one by one, so that the places of each are known."""
        found = super()._segments()

        def walk() -> Any:
            for name, layers, nodes in found:
                self.pending = []
                yield name, layers, nodes
                if self.pending:
                    self.chain.groups.append((layers, tuple(self.pending)))

        return walk()


def schedule_chain(
    graph: fx.Graph,
    step: StepSizes,
    classes: tuple[LayerClass, ...],
    target: Target,
    provider: KernelProvider,
    page_tokens: int,
    kv_pages: int,
) -> Chain:
    """The decode step without sampling. Raises UnsupportedModelError."""
    chain, listener = Chain(), _Listener(provider)
    scheduler = _ChainScheduler(
        chain, listener, graph, step, classes, target, listener, page_tokens, kv_pages
    )
    made = scheduler.run()
    chain.buffers = {buffer.name: buffer.bytes for buffer in made.buffers}
    chain.keys = made.keys
    return chain
