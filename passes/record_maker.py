"""Taking the record of a model from its final graph.

In: a graph after its passes. Out: a `ModelRecord` whose bytes and operations come from `cost_of`
at a few sizes. Changes nothing.
"""

from dataclasses import replace
from typing import Any

from torch import fx

from sitsc.core.printer import symbol_names
from sitsc.passes.cost import Cost, Sizes, cost_of
from sitsc.passes.cuda_values import ELEMENTWISE, Values, is_lazy
from sitsc.passes.fxutil import arguments, is_op, module_path, tensor, weight_of
from sitsc.passes.model_record import (
    ATTENTION,
    BY_EXPERTS,
    EMBEDDING,
    EXPERTS,
    HEADS,
    LINEAR,
    OTHER,
    ROW,
    VOCABULARY,
    Experts,
    Heads,
    ModelRecord,
    Op,
)
from sitsc.passes.tp_roles import roles

Node = Any
_TOKENS, _ROWS = (64, 128), (8, 16)
_SQUARES_BYTES = 4


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
        self.order = {node: index for index, node in enumerate(graph.nodes)}
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
            return replace(op, read_bytes=0, reduced_bytes=wide * (op.role == VOCABULARY))
        if op.role == ROW and is_op(node, "addmm"):
            x = node.args[1]
            return replace(op, columns=int(tensor(x).shape[-1]), inner=not self._of_heads(x))
        if op.role == HEADS and is_op(node, "rms_norm") and not self._by_head(node):
            return replace(op, reduced_bytes=_SQUARES_BYTES)  # over the heads of all ranks
        return op

    def _by_head(self, node: Node) -> bool:
        calls = [n for n in self.graph.nodes if is_op(n, "paged_attention")]
        return int(tensor(node).shape[-1]) in {self._heads(n).dim for n in calls}

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
            inner=op.role == ROW and not self._of_heads(a["x"]),
        )

    def _of_heads(self, value: Node) -> bool:
        """Whether attention made a cut value, perhaps together with other things."""
        ends, seen = [value], set()
        while ends:
            node = ends.pop()
            if is_op(node, "paged_attention"):
                return True
            if node not in seen and self.roles.get(node) == HEADS:
                seen.add(node)
                ends += list(node.all_input_nodes)
        return False

    def _joins(self, node: Node) -> bool:
        """Whether a partial sum is only added to a later one: one collective for both."""
        now = node
        while len(now.users) == 1:
            user = next(iter(now.users))
            if is_op(user, "add"):
                others = [self._partial(n) for n in user.all_input_nodes if n is not now]
                return any(n is not None and self.order[n] > self.order[node] for n in others)
            if is_op(user, "fused_linear", "moe"):
                sums = self.roles[user] in (ROW, BY_EXPERTS)
                return sums and arguments(user)["residual"] is now
            if not (self.values.passes_through(user) or is_op(user, "mul")):
                return False
            now = user
        return False

    def _partial(self, node: Node) -> Node | None:
        """The linear layer or experts whose partial sum a value is, through views and products."""
        ends = [node]
        while ends:
            one = ends.pop()
            if self.roles.get(one) in (ROW, BY_EXPERTS):
                return one
            if self.values.passes_through(one) or is_op(one, "mul"):
                ends += list(one.all_input_nodes)
        return None

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
            reduced_bytes=0 if self._joins(node) else hidden * self._compute_itemsize(),
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
