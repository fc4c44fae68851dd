"""What the cost model needs of a graph, in a compact record: taken once, asked many times.

In: a final graph. Out: for every class of layers its operators with bytes and operations as
functions of the step's sizes, taken from `cost_of`, and how tensor parallelism would cut them.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from sitsc.core.printer import symbol_names
from sitsc.passes.cost import Cost, Sizes, attention_cost, cost_of, experts_share
from sitsc.passes.cuda_values import ELEMENTWISE, Values, is_lazy
from sitsc.passes.fxutil import arguments, is_op, module_path, tensor, weight_of
from sitsc.passes.tp_roles import ROW, roles

Node = Any
LINEAR, ATTENTION, EXPERTS, EMBEDDING, OTHER = (
    "linear",
    "attention",
    "experts",
    "embedding",
    "other",
)
_TOKENS, _ROWS = (64, 128), (8, 16)


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of attention: heads, KV heads, dimensions a head, bytes a KV element, window or 0."""

    heads: int
    kv_heads: int
    dim: int
    itemsize: int
    window: int


@dataclass(frozen=True, slots=True)
class Experts:
    """Shape of routed experts."""

    experts: int
    top_k: int
    intermediate: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operator: bytes of weights, and of values and operations for each row.

    `rows` names what counts its rows: "tokens" of the step, or "rows" that need logits. For a
    linear layer `columns` are its inputs, `outputs` its products (gate and up both), and `norm`
    and `glu` say what is fused before and after; `heads` are those of the attention that it feeds
    with "qkv", "q" or "kv" (k or v). `reduced_bytes` of a row are summed over ranks after it.
    """

    name: str
    kind: str
    role: str
    rows: str
    weight: str
    weight_bytes: int
    read_bytes: int
    in_bytes: float
    out_bytes: float
    flops: float
    dtype: str
    columns: int = 0
    outputs: int = 0
    norm: bool = False
    glu: bool = False
    reduced_bytes: int = 0
    heads: Heads | None = None
    feeds: str = ""
    experts: Experts | None = None

    def cost(self, tokens: int, rows: int, sequences: int, context: int) -> Cost:
        """The uncut cost of a step, as `cost_of` says."""
        count = tokens if self.rows == "tokens" else rows
        if self.kind == ATTENTION and self.heads is not None:
            h = self.heads
            moved, flops = attention_cost(
                tokens, sequences, context, h.heads, h.kv_heads, h.dim, h.itemsize, h.window
            )
            moved += int((self.in_bytes + self.out_bytes) * tokens)
            return Cost(moved, flops, self.dtype)
        fixed = float(self.read_bytes)
        if self.experts is not None:
            fixed *= experts_share(self.experts.experts, self.experts.top_k, count)
        moved = fixed + (self.in_bytes + self.out_bytes) * count
        return Cost(int(moved), int(self.flops * count), self.dtype)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """Operators before the layers, of each class of layers, and after; layer → class."""

    architecture: str
    before: tuple[Op, ...]
    classes: tuple[tuple[Op, ...], ...]
    layers: tuple[int, ...]
    after: tuple[Op, ...]
    hidden: int
    vocabulary: int
    max_context: int

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def attention(self) -> tuple[Heads, ...]:
        """The distinct shapes of attention."""
        found = [op.heads for ops in self.classes for op in ops if op.kind == ATTENTION]
        return tuple(dict.fromkeys(h for h in found if h is not None))

    def experts(self) -> tuple[Experts, ...]:
        """The distinct shapes of routed experts."""
        found = [op.experts for ops in self.classes for op in ops]
        return tuple(dict.fromkeys(e for e in found if e is not None))


def record_of(graph: fx.Graph, architecture: str, vocabulary: int, max_context: int) -> ModelRecord:
    """The record of a final graph of tokens with pages."""
    maker = _Maker(graph)
    layers: dict[int, list[Op]] = {}
    before: list[Op] = []
    after: list[Op] = []
    for node in graph.nodes:
        op = maker.op(node) if node.op == "call_function" else None
        if op is None:
            continue
        layer = maker.values.layer.get(node)
        if layer is not None:
            op = replace(op, weight="")  # layers of one class differ in the names of weights
        target = layers.setdefault(layer, []) if layer is not None else after if layers else before
        target.append(op)
    classes: dict[tuple[Op, ...], int] = {}
    numbers = [classes.setdefault(tuple(ops), len(classes)) for _, ops in sorted(layers.items())]
    return ModelRecord(
        architecture=architecture,
        before=tuple(before),
        classes=tuple(classes),
        layers=tuple(numbers),
        after=tuple(after),
        hidden=maker.hidden(),
        vocabulary=vocabulary,
        max_context=max_context,
    )


class _Maker:
    """Operators of one graph, each from its cost at a few sizes."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.values, self.roles = graph, Values(graph, decode=True), roles(graph)
        symbols = symbol_names(graph)

        def sizes(tokens: int, rows: int) -> Sizes:
            known = {"tokens": tokens, "rows": rows, "sequences": rows, "sequences+1": rows + 1}
            return Sizes(symbols, known | {"context": 0, "sequence_pages": 1, "pages": 1})

        self.base = sizes(_TOKENS[0], _ROWS[0])
        self.steps = (
            ("tokens", sizes(_TOKENS[1], _ROWS[0]), _TOKENS),
            ("rows", sizes(_TOKENS[0], _ROWS[1]), _ROWS),
        )

    def hidden(self) -> int:
        """Width of the residual stream."""
        tables = [n for n in self.graph.nodes if is_op(n, "packed_embedding", "embedding")]
        return int(tensor(tables[0]).shape[-1])

    def op(self, node: Node) -> Op | None:
        """The record of a call; None for what costs nothing on its own."""
        if self._free(node) or cost_of(node, self.base) == Cost(0, 0, "float32"):
            return None
        if is_op(node, "paged_attention"):
            return self._attention(node)
        if is_op(node, "fused_linear"):
            return self._linear(node)
        if is_op(node, "moe"):
            return self._experts(node)
        kind = EMBEDDING if is_op(node, "packed_embedding", "embedding") else OTHER
        op = self._plain(node, kind)
        if kind is EMBEDDING:
            wide = int(tensor(node).shape[-1]) * self._compute_itemsize()
            op = replace(op, read_bytes=0, reduced_bytes=wide)
        return op

    def _compute_itemsize(self) -> int:
        linears = [n for n in self.graph.nodes if is_op(n, "fused_linear")]
        outputs = [tensor(n).dtype.itemsize for n in linears]
        return min(outputs, default=2)

    def _free(self, node: Node) -> bool:
        inside = self.values.passes_through(node) or is_op(node, "sym_size")
        return inside or (is_lazy(node) and not self.values.stored(node))

    def _plain(self, node: Node, kind: str) -> Op:
        """From the cost at two sizes: what is fixed, and what each row adds."""
        first = cost_of(node, self.base)
        rows, moved, flops = "tokens", 0.0, 0.0
        for name, sizes, (low, high) in self.steps:
            more = cost_of(node, sizes)
            if more != first:
                rows, moved = name, (more.bytes - first.bytes) / (high - low)
                flops = (more.flops - first.flops) / (high - low)
        count = self.base.values[rows]
        weights = [spec for n in node.all_input_nodes if (spec := weight_of(n)) is not None]
        return Op(
            name=_name(node),
            kind=kind,
            role=self.roles[node],
            rows=rows,
            weight=weights[0].name if kind is EMBEDDING else "",
            weight_bytes=sum(spec.nbytes for spec in weights),
            read_bytes=max(0, round(first.bytes - moved * count)),
            in_bytes=0.0,
            out_bytes=moved,
            flops=flops,
            dtype=first.dtype,
        )

    def _linear(self, node: Node) -> Op:
        a = arguments(node)
        op = self._plain(node, LINEAR)
        x = tensor(a["x"])
        columns, glu = int(x.shape[-1]), a["epilogue"] == "glu"
        reads = float(columns * x.dtype.itemsize)
        spec = weight_of(a["weight"])
        heads, feeds = self._fed(node)
        sums = op.role == ROW and not self._joins(node)
        reduced = a["out_features"] * self._compute_itemsize() if sums else 0
        return replace(
            op,
            weight=spec.name if spec else "",
            in_bytes=reads,
            out_bytes=op.out_bytes - reads,
            columns=columns,
            outputs=a["out_features"] * (2 if glu else 1),
            norm=a["prologue"] == "rms_norm",
            glu=glu,
            reduced_bytes=reduced,
            heads=heads,
            feeds=feeds,
        )

    def _joins(self, node: Node) -> bool:
        """Whether a partial sum is only added to another one: one collective for both."""
        users = list(node.users)
        if len(users) != 1 or not is_op(users[0], "fused_linear", "add"):
            return False
        if is_op(users[0], "add"):
            others = [n for n in users[0].all_input_nodes if n is not node]
            later = [n for n in others if self.roles.get(n) == ROW]
            return any(list(self.roles).index(n) > list(self.roles).index(node) for n in later)
        return self.roles[users[0]] == ROW and arguments(users[0])["residual"] is node

    def _fed(self, node: Node) -> tuple[Heads | None, str]:
        """The heads of the attention that a linear layer feeds, and with which parts."""
        ends, seen = list(node.users), set()
        while ends:
            user = ends.pop()
            if user in seen:
                continue
            seen.add(user)
            if is_op(user, "paged_attention"):
                found, width = self._heads(user), int(tensor(node).shape[-1])
                queries, keys = found.heads * found.dim, found.kv_heads * found.dim
                parts = {keys: "kv", queries: "q", queries + 2 * keys: "qkv"}
                return (found, parts[width]) if width in parts else (None, "")
            if not is_op(user, "fused_linear", "moe", "addmm"):
                ends += list(user.users)
        return None, ""

    def _heads(self, node: Node) -> Heads:
        a = arguments(node)
        heads, dim = (int(size) for size in tensor(a["q"]).shape[1:])
        size = tensor(a["kv"]).dtype.itemsize
        return Heads(heads, int(tensor(a["k"]).shape[1]), dim, size, int(a["window"]))

    def _attention(self, node: Node) -> Op:
        a = arguments(node)
        read = [self.base.nbytes(a[name]) for name in ("q", "k", "v")]
        tokens = self.base.values["tokens"]
        return Op(
            name=_name(node),
            kind=ATTENTION,
            role=self.roles[node],
            rows="tokens",
            weight="",
            weight_bytes=0,
            read_bytes=0,
            in_bytes=sum(read) / tokens,
            out_bytes=self.base.nbytes(node) / tokens,
            flops=0.0,
            dtype="float32",
            heads=self._heads(node),
        )

    def _experts(self, node: Node) -> Op:
        a = arguments(node)
        shape = Experts(int(tensor(a["logits"]).shape[-1]), a["top_k"], a["intermediate"])
        weights = [s for n in node.all_input_nodes if (s := weight_of(n)) is not None]
        hidden, tokens = int(tensor(node).shape[-1]), self.base.values["tokens"]
        rows = "tokens" if self.base.elements(node) == hidden * tokens else "rows"
        count = self.base.values[rows]
        values = [n for n in node.all_input_nodes if weight_of(n) is None]
        return Op(
            name=_name(node),
            kind=EXPERTS,
            role=self.roles[node],
            rows=rows,
            weight="",
            weight_bytes=sum(s.nbytes for s in weights),
            read_bytes=sum(s.nbytes for s in weights),
            in_bytes=sum(self.base.nbytes(n) for n in values) / count,
            out_bytes=self.base.nbytes(node) / count,
            flops=cost_of(node, self.base).flops / count,
            dtype=weights[0].dtype if weights else "float32",
            columns=hidden,
            outputs=2 * shape.intermediate,
            glu=True,
            reduced_bytes=hidden * self._compute_itemsize(),
            experts=shape,
        )


def _name(node: Node) -> str:
    """Where in a layer an operator stands: "mlp.down_proj"."""
    path = module_path(node)
    if is_op(node, "fused_linear") and (spec := weight_of(arguments(node)["weight"])):
        path = spec.name.rsplit(".", 1)[0]
    parts = [part for part in path.split(".") if not part.isdigit()]
    short = ".".join(part for part in parts if part not in ("model", "layers", ""))
    word = "elementwise" if is_op(node, *ELEMENTWISE) else str(getattr(node.target, "__name__", ""))
    return short or word.split(".")[0] or "step"
