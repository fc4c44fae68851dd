"""Launches and buffers of one bucket: what the kernels of a schedule are bound to.

In: kernel instances with what each argument stands for. Out: launches with their arguments and
costs, and every buffer with its lifetime in launches. Decides nothing about kernels.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from sitsc.core.errors import GraphError
from sitsc.core.kernels import KernelInfo, KernelProvider
from sitsc.core.layer_names import open_name
from sitsc.core.plan import ArenaBuffer, Argument, Launch, LaunchGroup, Target
from sitsc.core.printer import symbol_names
from sitsc.core.weights import DTYPES, dtype_name
from sitsc.passes.collectives import sum_itemsize
from sitsc.passes.cost import Sizes, cost_of
from sitsc.passes.cuda_refs import Ref, packed
from sitsc.passes.cuda_values import Values
from sitsc.passes.fxutil import tensor, weight_of
from sitsc.passes.launch_time import Work
from sitsc.passes.schedule import StepSizes

Node = Any
ALIGNMENT = 16
# Buffers of the whole step: sums of programs for the last of them, its counters, sums for readers.
# What residual layers scale for a norm, and sums of its squares.
# The slots of several ranks are sets for two calls, one slot in each for every other rank.
SCRATCH = {"partials": "float32", "counters": "int32", "sums": "float32", "slots": "int32"}
SCRATCH |= {"scaled": "float32", "squares": "float32"}
_SENT = {"all_reduce": "sum_ptr", "all_gather": "y_ptr"}  # what ranks have in common
_ROUNDED = ("tokens", "rows")
_ROWS = 8  # rows of a buffer come in multiples of this, so that what follows them is aligned


@dataclass(slots=True)
class Scheduled:
    """What a bucket launches and the buffers it needs, by name and bytes with their lifetimes.

    `works` says of every launch, in order, what it is for; from it `launch_time` takes the times.
    """

    groups: list[LaunchGroup] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    buffers: list[ArenaBuffer] = field(default_factory=list)
    keys: dict[str, KernelInfo] = field(default_factory=dict)
    logits: Argument | None = None


def _sent(template: str, bound: dict[str, Any]) -> int:
    """Bytes of what a collective gives to all ranks, as they travel."""
    place, parts = bound.get(_SENT.get(template, "")), bound.get("parts_ptr")
    if not isinstance(place, Ref):
        return 0
    itemsize = DTYPES[place.dtype].itemsize
    if isinstance(parts, Ref):
        itemsize = sum_itemsize(math.prod(place.shape[:-1]), place.shape[-1], parts.dtype)
    return math.prod(place.shape) * itemsize


def _moved(places: Iterable[Any]) -> int:
    """Bytes of the places in the arena among the arguments of a launch, each once."""
    sizes: dict[str, int] = {}
    for ref in places:
        if isinstance(ref, Ref) and ref.source == "arena" and ref.dtype in DTYPES:
            nbytes = math.prod(ref.shape) * DTYPES[ref.dtype].itemsize
            sizes[ref.buffer] = max(nbytes, sizes.get(ref.buffer, 0))
    return sum(sizes.values())


class LaunchBuilder:
    """Places values in buffers and makes launches of one bucket."""

    def __init__(
        self,
        graph: fx.Graph,
        step: StepSizes,
        target: Target,
        provider: KernelProvider,
        page_tokens: int,
        kv_pages: int,
        ranks: int = 1,
    ) -> None:
        self.ranks = ranks
        self.graph, self.step, self.target, self.provider = graph, step, target, provider
        self.kv_pages, self.symbols = kv_pages, symbol_names(graph)
        given = step.values(page_tokens)
        rounded = {name: -(-given[name] // _ROWS) * _ROWS for name in _ROUNDED}
        self.sizes = Sizes(self.symbols, given)
        self.layout = Sizes(self.symbols, given | rounded)
        self.priced = Sizes(self.symbols, step.priced().values(page_tokens))
        self.values = Values(graph, step.kind == "decode")
        self.reset()

    def reset(self) -> None:
        """Forget everything that was scheduled."""
        self.out = Scheduled()
        self.clock = 0
        self.life: dict[str, list[int]] = {}
        self.bytes: dict[str, int] = {}
        self.scratch = dict.fromkeys(SCRATCH, 0)
        self.places: dict[Node, Any] = {}
        self.owners: dict[str, list[Node]] = {}
        self.launches: list[Launch] = []
        self.in_layer: int | None = None

    # --- places -------------------------------------------------------------------------------

    def resolve(self, node: Node) -> Any:
        """The place of a value (a list for a split), None when it has none."""
        place = self.places.get(node)
        while isinstance(place, fx.Node):
            place = self.places.get(place)
        return place

    def place(self, node: Node) -> Ref:
        """The place of a value that was stored."""
        place = self.resolve(node)
        if not isinstance(place, Ref):
            raise GraphError(f"{node} is read before it is stored", hint="report the model")
        return place

    def input(self, node: Node) -> Ref:
        """The place of a placeholder: a weight, a step input or a KV pool."""
        dtype, shape = dtype_name(tensor(node).dtype), ()
        if not str(node.meta.get("input", "")).startswith("kv_"):
            shape = self.shape_of(node)
        if (spec := weight_of(node)) is not None:
            return Ref("weight", spec.name, spec.dtype, 0, spec.shape, packed(spec.shape, None))
        name = node.meta["input"]
        source = "kv" if name.startswith("kv_") else "arena"
        return Ref(source, name, dtype, 0, shape, packed(shape, None))

    def shape_of(self, node: Node) -> tuple[int, ...]:
        """Sizes of a value in memory; those that no bucket decides count as one."""
        known = self.layout.known
        return tuple(
            self.layout.of(size) if isinstance(size, int) or str(size) in known else 1
            for size in tensor(node).shape
        )

    def new(self, node: Node, *, in_order: bool = False, parts: int = 0) -> Ref:
        """A buffer for the value of a node, alive from now to its last reader.

        Rows are the outermost dimension, or dimensions stand `in_order`. With `parts` it is the
        first of so many of fp32, whose sum is the value.
        """
        shape, rows = self.shape_of(node), None
        if not in_order:
            sizes = enumerate(tensor(node).shape)
            rows = next((dim for dim, size in sizes if not isinstance(size, int)), None)
        dtype = "float32" if parts else dtype_name(tensor(node).dtype)
        ref = Ref("arena", self.buffer_name("v"), dtype, 0, shape, packed(shape, rows))
        self.bytes[ref.buffer] = math.prod(shape) * DTYPES[dtype].itemsize * max(1, parts)
        self.own(node, ref)
        return ref

    def buffer_name(self, what: str) -> str:
        """A name that no other buffer has."""
        return f"{what}{len(self.bytes)}"

    def own(self, node: Node, ref: Ref) -> Ref:
        """Say that a node's value is written to `ref` from now on."""
        self.touch(ref)
        self.places[node] = ref
        self.owners.setdefault(ref.buffer, []).append(node)
        return ref

    def temporary(self, name: str, shape: tuple[int, ...], dtype: str) -> Ref:
        """A buffer that lives for the launches around it."""
        ref = Ref("arena", self.buffer_name(name), dtype, 0, shape, packed(shape, None))
        self.bytes[ref.buffer] = math.prod(shape) * DTYPES[dtype].itemsize
        self.touch(ref)
        return ref

    def touch(self, ref: Ref) -> None:
        """The buffer is used by the launch that is being made."""
        if ref.source == "arena" and ref.buffer in self.bytes:
            life = self.life.setdefault(ref.buffer, [self.clock, self.clock])
            life[1] = self.clock

    # --- launches -----------------------------------------------------------------------------

    def count(self, node: Node) -> str:
        """The name of the size that counts the rows of a node; empty when nothing does."""
        names = [self.symbols.get(str(size), "") for size in tensor(node).shape]
        return next((name for name in names if name in _ROUNDED), "")

    def kernel(
        self, info: KernelInfo, bound: dict[str, Any], node: Node, *, counted: bool = True
    ) -> None:
        """Launch a kernel; values of `bound` are places, names of sizes, or numbers.

        The cost of the node is counted unless another of its launches has it.
        """
        self.clock += 1
        if any(name == "counter_ptr" for name, _ in info.arguments):
            self.scratch["partials"] = max(self.scratch["partials"], info.num_partials)
            self.scratch["counters"] = max(self.scratch["counters"], info.num_counters)
            bound = bound | {
                "partial_ptr": Ref("arena", "partials", "float32"),
                "counter_ptr": Ref("arena", "counters", "int32"),
            }
        args = [self._bind(info, name, kind, bound.get(name)) for name, kind in info.arguments]
        self.out.keys[info.key] = info
        cost = cost_of(node, self.priced) if counted else None
        sent = _sent(info.template, bound)
        self.out.works.append(Work(node, cost, _moved(bound.values()), sent))
        self.launches.append(
            Launch(
                kind="kernel",
                kernel=info.key,
                template=info.template,
                tile=info.tile,
                grid=info.grid,
                arguments=tuple(args),
                outputs=(),
                stream=0,
                dependent=info.dependent,
                bytes=cost.bytes if cost else 0,
                flops=cost.flops if cost else 0,
                predicted_us=0.0,
            )
        )

    def _bind(self, info: KernelInfo, name: str, kind: str, value: Any) -> Argument:
        if isinstance(value, Ref):
            self.touch(value)
            mapped = kind.startswith("tensordesc")
            return self.argument(name, value, value.shape if mapped else ())
        if isinstance(value, str):
            return Argument(name, "size", value, kind, ())
        if isinstance(value, float):
            return Argument(name, "scalar", "", kind, (), value)
        raise GraphError(f"kernel {info.template} wants {name}, which nothing gives")

    def product(self, node: Node, x: Ref, w: Ref, y: Ref, rows: int, *, kernel: str) -> None:
        """A product by the library, with `rows` elements a row of y.

        "mm": y = x @ w.T, "addmm": y += x @ w.T, "mm_kn": y = x @ w, whose rows are columns of x.
        """
        self.clock += 1
        for ref in (x, y):
            self.touch(ref)
        count, columns = self.count(node), x.shape[-1]
        args = (
            self.argument("x", x, (count, columns)),
            self.argument("w", w, (columns, rows) if kernel == "mm_kn" else (rows, columns)),
            self.argument("y", y, (count, rows)),
        )
        cost = cost_of(node, self.priced)
        self.out.works.append(Work(node, cost, _moved((x, y))))
        self.launches.append(
            Launch(
                kind="library",
                kernel=kernel,
                template="",
                tile={},
                grid=(),
                arguments=args,
                outputs=(),
                stream=0,
                dependent=False,
                bytes=cost.bytes,
                flops=cost.flops,
                predicted_us=0.0,
            )
        )

    def argument(self, name: str, ref: Ref, shape: tuple[int | str, ...]) -> Argument:
        """A place as an argument of a launch; in layers, which one is left open in a name."""
        item, buffer = DTYPES[ref.dtype].itemsize, ref.buffer
        if ref.source == "weight" and self.in_layer is not None:
            buffer = open_name(buffer, self.in_layer, following=ref.following)
        return Argument(
            name, ref.source, buffer, ref.dtype, shape, None, ref.offset * item, ref.layer_stride
        )

    def finish(self, output: Node | None) -> None:
        """Logits as an argument, if there are any, and every buffer with its lifetime."""
        self.clock += 1
        if output is not None:
            ref, width = self.place(output), self.sizes.of(tensor(output).shape[-1])
            self.touch(ref)
            self.out.logits = self.argument("logits", ref, ("rows", width))
        for name, nbytes in self.bytes.items():
            first, last = self.life[name]
            self.out.buffers.append(ArenaBuffer(name, "uint8", (nbytes,), 0, nbytes, first, last))
        for name, dtype in SCRATCH.items():
            if count := self.scratch[name]:
                buffer = ArenaBuffer(name, dtype, (count,), 0, count * 4, 0, self.clock)
                self.out.buffers.append(buffer)
