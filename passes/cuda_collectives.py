"""Sums and gathers over ranks in a CUDA schedule, one kernel each.

In: nodes of sitsc::all_reduce and all_gather. Out: launches that write to the other ranks' arenas,
which are alike. A sum that a norm reads first is made by one kernel together with residual and
norm; it adds the parts that a linear layer has left.
"""

import math
from dataclasses import replace
from typing import Any

from torch import fx

from sitsc.core.kernels import CROSSING_PROGRAMS, MOST_PROGRAMS, KernelInfo
from sitsc.core.plan import ArenaBuffer, LaunchGroup
from sitsc.core.weights import DTYPES, dtype_name
from sitsc.passes.collectives import sum_itemsize
from sitsc.passes.cuda_parts import PartOps, Sums, whole_rows
from sitsc.passes.cuda_pointwise import unsupported
from sitsc.passes.cuda_refs import Ref
from sitsc.passes.fxutil import arguments, is_op, tensor
from sitsc.passes.stages import CROSSING

Node = Any
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}
_VECTOR_BYTES = 16
_WIDEST = 8192  # vectors of a row of all ranks that the threads of one program have registers for
_OF_ALL = {"peers_ptr": ("peers", "int64"), "calls_ptr": ("calls", "int64")}
_IDS_BYTES = 16  # of a sampled id on its way
CALLS = 32  # numbers that programs count calls with, see codegen/templates/cuda_ranks.py.j2
_LONG = {"i8": "uint8", "i32": "int32", "i64": "int64"}


def is_crossing(node: Node) -> bool:
    """Whether an input is what an earlier stage has computed."""
    return node.op == "placeholder" and str(node.meta.get("input", "")).startswith(CROSSING)


def first_sends(graph: fx.Graph) -> str:
    """What the first of several stages sends on; "" of any other graph."""
    if any(is_crossing(node) for node in graph.nodes):
        return ""
    return next(iter(graph.output_node().meta.get("outputs", ())), "")


def row_bytes(node: Node) -> int:
    """Bytes of a row of a value [1, tokens, …]. Raises UnsupportedModelError for other values."""
    shape = list(tensor(node).shape)
    at = next((dim for dim, size in enumerate(shape) if not isinstance(size, int)), 0)
    if math.prod(shape[:at]) != 1 or not all(isinstance(size, int) for size in shape[at + 1 :]):
        raise unsupported(node, "between stages")
    return math.prod(shape[at + 1 :]) * tensor(node).dtype.itemsize


def rank_buffers(ranks: int) -> list[ArenaBuffer]:
    """What collectives of so many ranks read and count with; slots are scratch of the schedule."""
    if ranks == 1:
        return []
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "tp_rank": ("int64", (1,)),
        "peers": ("int64", (ranks + 2,)),
        "calls": ("int64", (CALLS,)),
        "pads": ("int32", (MOST_PROGRAMS, ranks)),
    }
    return planned_buffers(shapes)


def planned_buffers(shapes: dict[str, tuple[str, tuple[int, ...]]]) -> list[ArenaBuffer]:
    """Buffers of these dtypes and shapes, not placed yet."""
    return [
        ArenaBuffer(name, dtype, shape, 0, math.prod(shape) * DTYPES[dtype].itemsize, 0, 0)
        for name, (dtype, shape) in shapes.items()
    ]


def crossing_buffers(graph: fx.Graph, rows: int) -> list[ArenaBuffer]:
    """What a stage needs to receive and to send up to `rows` rows; see codegen/cuda_ranks.py."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for node in graph.nodes:
        if is_crossing(node):
            name, wide = node.meta["input"], row_bytes(node)
            shapes |= {
                name: ("uint8", (rows, wide)),
                f"{name}/mail": ("uint8", (2, rows, wide)),
                f"{name}/flags": ("int32", (CROSSING_PROGRAMS,)),
                f"{name}/from": ("int64", (2,)),
                f"{name}/received": ("int64", (CALLS,)),
            }
    for name in graph.output_node().meta.get("outputs", ()):
        shapes |= {
            f"{name}/acks": ("int32", (CROSSING_PROGRAMS,)),
            f"{name}/to": ("int64", (3,)),
            f"{name}/sent": ("int64", (CALLS,)),
        }
    return planned_buffers(shapes)


def slots_bytes(ranks: int, rows: int, row_bytes: int) -> int:
    """Of the slots for rows from all other ranks, for two calls."""
    return 2 * (ranks - 1) * rows * row_bytes


class RankOps(PartOps):
    """Launches of collectives."""

    def reset(self) -> None:
        """Forget everything that was scheduled."""
        super().reset()
        self._last_call = 0  # since when the other ranks may be as far as the next collective
        if self.ranks > 1:
            self._need_slots(max(self.step.sequences, self.step.tokens), _IDS_BYTES)

    def all_reduce(self, node: Node) -> None:
        """residual + the sum of x over ranks, at once or together with the norm that reads it."""
        a = arguments(node)
        sums = self.unsummed.pop(self._root(a["x"]), None) or self._whole(a["x"])
        base = None if a["residual"] is None else self.rows(a["residual"])
        sums = replace(sums, base=base)
        over = [] if a["residual"] is None else [a["residual"]]
        out = self.destination(node, [sums.parts], over)
        if self.waiting or not self.norm_first(node):
            self.sum_of_ranks(node, out, sums, {}, {"columns": out.shape[-1], "norm": False})
            return
        self.waiting[out.buffer] = sums

    def sum_of_ranks(
        self, node: Node, out: Ref, sums: Sums, bound: dict[str, Any], shape: dict[str, Any]
    ) -> None:
        """Launch the kernel that leaves a sum in `out`, with the norm that `shape` has."""
        count = self.count(node)
        rows = math.prod(out.shape[:-1])
        kind = _SHORT[sums.parts.dtype]
        itemsize = sum_itemsize(rows, out.shape[-1], sums.parts.dtype)
        payload = "fp32" if itemsize == 4 else "bf16"
        vectors = self.ranks * out.shape[-1] * itemsize // _VECTOR_BYTES
        if vectors > _WIDEST and shape.get("blocks", 1) == 1:
            if shape.get("norm", True):
                self._norm_after(node, out, sums, bound, shape)
                return
            shape = shape | {"blocks": 1 << (-(-vectors // _WIDEST) - 1).bit_length()}
        self._need_slots(rows, out.shape[-1] * itemsize)
        shape = shape | {
            "ranks": self.ranks,
            "payload": payload,
            "parts": sums.count,
            "parts_dtype": kind,
            "x_dtype": _SHORT[out.dtype],
            "residual": sums.base is not None,
            "rows": self._rows(node, out),
            "many": self.step.kind != "decode",
        }
        shape |= {"weight": bound.get("norm_ptr") is not None}
        info = self.provider.make("all_reduce", **shape)
        bound = bound | {"x_ptr": sums.base, "parts_ptr": sums.parts, "sum_ptr": out}
        self._call(node, info, bound | {"num_rows": count})

    def _norm_after(
        self, node: Node, out: Ref, sums: Sums, bound: dict[str, Any], shape: dict[str, Any]
    ) -> None:
        """A sum over ranks, and the norm as a kernel of its own."""
        self.sum_of_ranks(node, out, sums, {}, {"columns": shape["columns"], "norm": False})
        known = {k: shape[k] for k in ("columns", "eps", "offset", "x_dtype") if k in shape}
        weight = bound.get("norm_ptr") is not None
        info = self.provider.make("rms_norm", **known, weight=weight, count=self.count(node))
        self.kernel(info, bound | {"x_ptr": out}, node, counted=False)

    def all_gather(self, node: Node) -> None:
        """x of every rank, side by side. Raises UnsupportedModelError for other than rows."""
        a = arguments(node)
        x, dim = self.rows(a["x"]), a["dim"] % tensor(node).dim()
        outer = [size for size in tensor(a["x"]).shape[:dim] if not isinstance(size, int)]
        fixed = [size for size in tensor(a["x"]).shape[:dim] if isinstance(size, int)]
        if len(outer) != 1 or math.prod(fixed) != 1 or a["size"] != self.ranks:
            raise unsupported(node, "along this dimension")
        inner = math.prod(x.shape[dim:]) * DTYPES[x.dtype].itemsize
        if inner % _VECTOR_BYTES:
            raise unsupported(node, f"of {inner} bytes, no multiple of {_VECTOR_BYTES}")
        out = self.new(node)
        self.life[out.buffer][0] = self._written_from(node)
        rows = self.sizes.of(outer[0])
        info = self.provider.make("all_gather", ranks=self.ranks, inner_bytes=inner, rows=rows)
        pads = Ref("arena", "pads", "int32")
        bound = {"x_ptr": x, "y_ptr": out, "pads_ptr": pads, "num_rows": self.count(node)}
        self._call(node, info, bound)

    def product_of_ours(self, node: Node, info: KernelInfo, x: Ref, scale: Ref | None) -> None:
        """A linear layer that leaves its only sum, in fp32, to the sum over ranks."""
        parts, a = self._to_sum(node, "float32"), arguments(node)
        norm = None if a["norm_weight"] is None else self.place(a["norm_weight"])
        bound = {"norm_ptr": norm, "squares_ptr": scale, "y_ptr": parts}
        self.kernel(info, bound | self.operands(node, x), node)

    def product_of_library(self, node: Node, x: Ref, w: Ref, rows: int) -> None:
        """A product by the library that the sum over ranks reads."""
        self.product(node, x, w, self._to_sum(node, "bfloat16"), rows, kernel="mm")

    def logits(self, node: Node) -> None:
        """Rows of logits one after another: those of a padded vocabulary are gathered longer."""
        begin, self.launches = self.clock, []
        self.places[node] = self.rows(node)
        self._group("logits", begin)

    # --- between stages -----------------------------------------------------------------------

    def receive(self) -> None:
        """What the stage before has sent, before everything else."""
        begin, self.launches = self.clock, []
        for node in self.graph.nodes:
            if is_crossing(node):
                bound = {"mail_ptr": "mail", "flags_ptr": "flags", "links_ptr": "from"}
                self._cross(node, "receive", node.meta["input"], bound, "y_ptr", "received")
        self._group("receive", begin)

    def send(self) -> None:
        """What later stages need, after everything else."""
        output = self.graph.output_node()
        begin, self.launches, values = self.clock, [], output.args[0]
        nodes = list(values) if isinstance(values, (list, tuple)) else [values]
        for node, name in zip(nodes, output.meta["outputs"], strict=True):
            self._complete(node)
            bound = {"acks_ptr": "acks", "links_ptr": "to"}
            self._cross(node, "send", name, bound, "x_ptr", "sent")
        self._group("send", begin)

    def _complete(self, node: Node) -> None:
        """Add what a value still has in parts: the layers before it leave that to a norm."""
        x = self.rows(node)
        if (sums := self.added(x)) is None:
            return
        if sums.ranks > 1:
            self.sum_of_ranks(node, x, sums, {}, {"columns": x.shape[-1], "norm": False})
            return
        assert sums.base is not None
        shape = {"columns": x.shape[-1], "eps": 0.0, "x_dtype": _SHORT[x.dtype], "weight": False}
        shape |= {"parts": sums.count, "parts_dtype": _SHORT[sums.parts.dtype]}
        info = self.provider.make("rms_norm", **shape, count=self.count(node))
        bound = {"x_ptr": sums.base, "parts_ptr": sums.parts, "sum_ptr": x}
        unread = self.temporary("unread", x.shape, "bfloat16")
        self.kernel(info, bound | {"y_ptr": unread}, node, counted=False)

    def _cross(
        self, node: Node, template: str, name: str, ends: dict[str, str], own: str, calls: str
    ) -> None:
        info = self.provider.make(template, inner_bytes=row_bytes(node))
        bound: dict[str, Any] = {n: Ref("arena", f"{name}/{end}", "") for n, end in ends.items()}
        for argument, kind in info.arguments:
            if argument in bound:
                bound[argument] = replace(bound[argument], dtype=_LONG[kind.removeprefix("*")])
        bound |= {own: self.rows(node), "calls_ptr": Ref("arena", f"{name}/{calls}", "int64")}
        self.kernel(info, bound | {"num_rows": self.count(node)}, node, counted=False)

    def _group(self, name: str, begin: int) -> None:
        if self.clock > begin:
            self.out.groups.append(LaunchGroup(name, (), tuple(self.launches)))

    def place_to_sum(self, node: Node) -> Ref | None:
        """Where a value goes that nothing but the sum over ranks reads; None for all others.

        The same place in every layer, so that layers repeat.
        """
        users = self.values.readers(node)
        if self.waiting or len(users) != 1 or not is_op(users[0], "all_reduce"):
            return None
        if self._root(arguments(users[0])["x"]) is not node or not whole_rows(node):
            return None
        return self._to_sum(node, dtype_name(tensor(node).dtype))

    def _to_sum(self, node: Node, dtype: str) -> Ref:
        """The place of a value that only the sum over ranks will read."""
        place = self._scratch(self.shape_of(node), 1, dtype)
        self.unsummed[node] = Sums(None, place, 1, self.ranks)
        return place

    def _root(self, node: Node) -> Node:
        """What a view is of."""
        while self.values.passes_through(node):
            node = node.args[0]
        return node

    def _whole(self, node: Node) -> Sums:
        """A stored value as the only sum of this rank."""
        return Sums(None, self.rows(node), 1, self.ranks)

    def _call(self, node: Node, info: KernelInfo, bound: dict[str, Any]) -> None:
        bound = bound | {n: Ref("arena", *place) for n, place in _OF_ALL.items()}
        bound |= {"slots_ptr": Ref("arena", "slots", "int32")}
        self.kernel(info, bound, node, counted=is_op(node, "all_reduce", "all_gather"))
        self._last_call = self.clock

    def _written_from(self, node: Node) -> int:
        """Since when other ranks may write what a gather of this one makes.

        In layers that repeat also since the last collective of the layer before: `_segment` keeps
        what is there at the beginning of a run until its end.
        """
        begin = self.clock - len(self.launches)
        return self._last_call if self.values.layer[node] is None else min(self._last_call, begin)

    def _rows(self, node: Node, out: Ref) -> int:
        """Rows of the step; places of values have some more."""
        names = [self.sizes.of(size) for size in tensor(node).shape if not isinstance(size, int)]
        return names[0] if names else math.prod(out.shape[:-1])

    def _need_slots(self, rows: int, row_bytes: int) -> None:
        count = slots_bytes(self.ranks, rows, row_bytes) // 4
        self.scratch["slots"] = max(self.scratch["slots"], count)
