"""CUDA schedule: the final graph as launches of kernels and library calls, for one bucket.

In: the graph, the sizes of the bucket, a provider of kernel instances. Out: launch groups (layers
of one class in a row are one group) and the arena buffers that they use. The residual stream lives
in one buffer that is updated in place; layers reuse the same places.
"""

from itertools import pairwise
from typing import Any

from torch import fx

from sitsc.core.kernels import KernelProvider
from sitsc.core.plan import LaunchGroup, LayerClass, Target
from sitsc.passes.cuda_launch import Scheduled
from sitsc.passes.cuda_ops import KernelOps
from sitsc.passes.cuda_pointwise import unsupported
from sitsc.passes.cuda_refs import Ref, is_view, view
from sitsc.passes.cuda_values import REDUCTIONS, is_lazy, is_selection
from sitsc.passes.fxutil import is_op
from sitsc.passes.schedule import StepSizes

__all__ = ["CudaScheduler", "Scheduled"]

Node = Any
_OWN = ("fused_linear", "rms_norm", "layer_norm", "packed_embedding", "rope_table")
_OWN += ("moe", "paged_attention", "addmm", "all_reduce", "all_gather")


class _CannotRepeatError(Exception):
    """Layers of a run do not find their values where the first finds them."""


class CudaScheduler(KernelOps):
    """Walks a graph once and emits the launches of one bucket."""

    def __init__(
        self,
        graph: fx.Graph,
        step: StepSizes,
        classes: tuple[LayerClass, ...],
        target: Target,
        provider: KernelProvider,
        page_tokens: int,
        kv_pages: int,
        ranks: int = 1,
    ) -> None:
        super().__init__(graph, step, target, provider, page_tokens, kv_pages, ranks)
        self.classes = classes
        self.by_layer: dict[int | None, list[Node]] = {}
        for node in graph.nodes:
            if node.op == "call_function":
                self.by_layer.setdefault(self.values.layer[node], []).append(node)

    def run(self) -> Scheduled:
        """All groups of the bucket, before, in and after the layers.

        Raises UnsupportedModelError for an operator without a kernel.
        """
        for apart in (0, 1):
            try:
                return self._schedule(apart)
            except _CannotRepeatError:
                continue
        return self._schedule(len(self.by_layer))

    def _schedule(self, apart: int) -> Scheduled:
        """The first `apart` layers of every run are groups of their own."""
        self.reset()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.places[node] = self.input(node)
        self.receive()
        segments = self._segments(apart)
        for _, layers, _ in segments:
            self._expect(layers)
            self.following |= {ours: theirs for theirs, ours in self.carried.items()}
        for name, layers, nodes in segments:
            self._segment(name, layers, nodes)
        output = self.graph.output_node()
        if output.meta.get("outputs"):
            self.send()
            self.finish(None)
        else:
            self.logits(output.args[0])
            self.finish(output.args[0])
        return self.out

    # --- layers -------------------------------------------------------------------------------

    def _segment(self, name: str, layers: tuple[int, ...], nodes: list[Node]) -> None:
        """Launches of layers of one class in a row, or of what stands before and after layers."""
        begin, self.launches = self.clock, []
        self.in_layer = layers[0] if layers else None
        self._expect(layers)
        found = self.begin_layers()
        for node in nodes:
            self._node(node)
        if len(layers) > 1:
            if not self.same_parts(found):
                raise _CannotRepeatError
            self._check_repeats(layers)
            self._leave(layers)
            self._keep_over_layers(begin)
        if self.launches:
            self.out.groups.append(LaunchGroup(name, layers, tuple(self.launches)))
        self.in_layer = None

    def _segments(self, apart: int) -> list[tuple[str, tuple[int, ...], list[Node]]]:
        """Nodes before the layers, runs of layers of one class (nodes of the first), the rest."""
        kinds = {layer: c.name for c in self.classes for layer in c.layers}
        runs: list[tuple[str, list[int], list[Node]]] = []
        length = 0  # layers of this class in a row, as far as they are read
        for node in (n for n in self.graph.nodes if n.op == "call_function"):
            layer = self.values.layer[node]
            name = "step" if layer is None else kinds[layer]
            last = runs[-1] if runs else None
            follows = last is not None and last[0] == name
            if last is not None and follows and (layer is None or layer in last[1]):
                last[2].append(node)
            elif last is not None and follows and layer is not None and length > apart:
                last[1].append(layer)
                last[2].append(node)
                length += 1
            else:
                length = length + 1 if follows else 1
                runs.append((name, [] if layer is None else [layer], [node]))
        found = []
        for name, layers, nodes in runs:
            first = self.by_layer[layers[0]] if len(layers) > 1 else nodes
            for layer in layers[1:]:
                twins = self.by_layer[layer]
                if len(twins) != len(first):
                    raise _CannotRepeatError
                self.places |= dict(zip(twins, first, strict=True))
                for twin, node in zip(twins, first, strict=True):
                    self.twins.setdefault(node, []).append(twin)
            found.append((name, tuple(layers), first))
        return found

    def _pairs(self, layers: tuple[int, ...]) -> list[tuple[Node, Node, int]]:
        """(what a later layer reads, what the first reads in its stead, the later layer)."""
        first = self.by_layer[layers[0]]
        found = []
        for layer in layers[1:]:
            for twin, node in zip(self.by_layer[layer], first, strict=True):
                pairs = zip(twin.all_input_nodes, node.all_input_nodes, strict=True)
                found += [(theirs, ours, layer) for theirs, ours in pairs]
        return found

    def _expect(self, layers: tuple[int, ...]) -> None:
        """Remember which values of a layer the next one looks for in the place of which others."""
        self.carried = {}
        if len(layers) > 1:
            inside = set(self.by_layer[layers[0]])
            for theirs, ours, layer in self._pairs(layers[:2]):
                if layer == layers[1] and theirs in inside:
                    self.carried[theirs] = ours

    def _check_repeats(self, layers: tuple[int, ...]) -> None:
        """Raises _CannotRepeatError unless all layers find what they read where the first does."""
        inside = set(self.by_layer[layers[0]])
        for theirs, ours, _ in self._pairs(layers):
            moved = ours not in inside and "weight" not in ours.meta
            if moved and self.resolve(theirs) != self.resolve(ours):
                raise _CannotRepeatError
        for layer, following in pairwise(layers):
            near = {layer, following}
            for node in self.by_layer[layer]:
                if any(self.values.layer.get(user) not in near for user in node.users):
                    raise _CannotRepeatError

    def _leave(self, layers: tuple[int, ...]) -> None:
        """What the first layer left in its places is the last layer's from now on.

        Raises _CannotRepeatError when later nodes read what a layer has written over.
        """
        pairs = zip(self.by_layer[layers[0]], self.by_layer[layers[-1]], strict=True)
        for node, twin in pairs:
            place, root = self.resolve(node), node
            while self.values.passes_through(root):
                root = root.args[0]
            kept = isinstance(place, Ref) and root in self.owners.get(place.buffer, [])
            if kept and root is node:
                self.owners[place.buffer].append(twin)
            later = any(self.values.layer.get(user) != layers[-1] for user in twin.users)
            if later and not kept and isinstance(place, Ref):
                raise _CannotRepeatError

    def _keep_over_layers(self, begin: int) -> None:
        """What a repeated layer reads from before it must last until its last repetition."""
        for life in self.life.values():
            if life[0] <= begin < life[1]:
                life[1] = self.clock

    # --- one node -----------------------------------------------------------------------------

    def _node(self, node: Node) -> None:
        if node in self.places or is_op(node, "sym_size"):
            return
        if is_view(node):
            self._view(node)
        elif is_selection(node):
            self.selection(node)
        elif is_lazy(node):
            if self.values.stored(node):
                self.store(node)
        elif is_op(node, *REDUCTIONS):
            self.reduce(node, next(name for name in REDUCTIONS if is_op(node, name)))
        else:
            name = next((name for name in _OWN if is_op(node, name)), None)
            if name is None:
                raise unsupported(node)
            getattr(self, name)(node)

    def _view(self, node: Node) -> None:
        """A place in its source; a copy where no place can be named and a kernel needs one."""
        source = self.resolve(node.args[0])
        if source is None:
            return
        place = view(node, source, self.layout)
        if place is not None:
            self.places[node] = place
        elif self.values.stored(node):
            self.store(node)
