"""CUDA schedule: the final graph as launches of kernels and library calls, for one bucket.

In: the graph, the sizes of the bucket, a provider of kernel instances. Out: launch groups (layers
of one class are one group) and the arena buffers that they use. The residual stream lives in one
buffer that the epilogues update in place; layers reuse the same places.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from sitsc.core.errors import GraphError, UnsupportedModelError
from sitsc.core.kernels import KernelInfo, KernelProvider
from sitsc.core.plan import ArenaBuffer, Argument, Launch, LaunchGroup, LayerClass, Target
from sitsc.core.printer import symbol_names
from sitsc.core.weights import DTYPES
from sitsc.passes.cost import Cost, Sizes, cost_of, predict_us
from sitsc.passes.cuda_refs import Ref, is_view, stored, view
from sitsc.passes.fxutil import arguments, is_op, layer_of, tensor
from sitsc.passes.schedule import StepSizes

Node = Any
LIBRARY_TOKENS = 64
_SHORT = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(slots=True)
class Scheduled:
    """What a bucket launches and the buffers it needs, by name and bytes with their lifetimes."""

    groups: list[LaunchGroup] = field(default_factory=list)
    buffers: list[ArenaBuffer] = field(default_factory=list)
    keys: dict[str, KernelInfo] = field(default_factory=dict)
    logits: Argument | None = None


class CudaScheduler:
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
    ) -> None:
        self.kv_pages = kv_pages
        self.graph, self.step, self.target, self.provider = graph, step, target, provider
        self.classes, self.page_tokens = classes, page_tokens
        self.symbols = symbol_names(graph)
        self.sizes = Sizes(self.symbols, step.values(page_tokens))
        self.places: dict[Node, Any] = {}
        self.out = Scheduled()
        self.clock = 0
        self.life: dict[str, list[int]] = {}
        self.bytes: dict[str, int] = {}
        self.scratch = {"partials": 0, "counters": 0}

    def run(self) -> Scheduled:
        """All groups of the bucket, before, in and after the layers."""
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.places[node] = self._input(node)
        for name, layers, nodes in self._segments():
            launches: list[Launch] = []
            begin = self.clock
            for node in nodes:
                launches += self._node(node, repeated=bool(layers))
            if len(layers) > 1:
                self._keep_over_layers(begin)
            if launches:
                self.out.groups.append(LaunchGroup(name, layers, tuple(launches)))
        self._finish()
        return self.out

    # --- walking ------------------------------------------------------------------------------

    def _segments(self) -> list[tuple[str, tuple[int, ...], list[Node]]]:
        """Nodes before the layers, runs of layers of one class (nodes of the first), the rest."""
        kinds = {layer: c.name for c in self.classes for layer in c.layers}
        calls = [n for n in self.graph.nodes if n.op == "call_function"]
        runs: list[tuple[str, list[int], list[Node]]] = []
        for node in calls:
            layer = layer_of(node)
            name = "step" if layer is None else kinds[layer]
            if runs and layer is not None and runs[-1][0] == name:
                if layer not in runs[-1][1]:
                    runs[-1][1].append(layer)
                runs[-1][2].append(node)
            elif layer is None and runs and runs[-1][0] == "step":
                runs[-1][2].append(node)
            else:
                runs.append((name, [] if layer is None else [layer], [node]))
        found = []
        for name, layers, nodes in runs:
            first = [n for n in nodes if not layers or layer_of(n) == layers[0]]
            self._alias_layers(layers, nodes, first)
            found.append((name, tuple(layers), first))
        return found

    def _keep_over_layers(self, begin: int) -> None:
        """What a repeated layer reads from before it must last until its last repetition."""
        for life in self.life.values():
            if life[0] <= begin < life[1]:
                life[1] = self.clock

    def _alias_layers(self, layers: list[int], nodes: list[Node], first: list[Node]) -> None:
        """Later layers of a run write where the first does; remember whose place a value has."""
        for layer in layers[1:]:
            same = [n for n in nodes if layer_of(n) == layer]
            for twin, node in zip(same, first, strict=True):
                self.places[twin] = node

    def _place(self, node: Node) -> Any:
        place = self.places[node]
        return self._place(place) if isinstance(place, fx.Node) else place

    def _input(self, node: Node) -> Ref | None:
        spec = node.meta.get("weight")
        if spec is not None:
            return Ref("weight", spec.name, spec.dtype, 0, spec.shape[-1])
        name = node.meta["input"]
        source = "kv" if name.startswith("kv_") else "arena"
        return Ref(source, name, str(tensor(node).dtype).removeprefix("torch."), 0, 0)

    # --- one node -----------------------------------------------------------------------------

    def _node(self, node: Node, repeated: bool) -> list[Launch]:
        if is_view(node):
            self.places[node] = view(node, self._place(node.args[0]), self.sizes)
            return []
        if is_op(node, "sym_size"):
            return []
        for name in ("fused_linear", "rms_norm", "packed_embedding", "rope_table", "index"):
            if is_op(node, name):
                return getattr(self, f"_{name}")(node, repeated)
        if is_op(node, "paged_attention"):
            return self._attention(node, repeated)
        raise UnsupportedModelError(
            f"operator {node.target} has no CUDA kernel", hint="compile for --target cpu"
        )

    def _new(self, node: Node, name: str | None = None) -> Ref:
        """A buffer for the value of a node, alive from now to its last reader."""
        width = self.sizes.of(tensor(node).shape[-1])
        ref = stored(node, name or f"v{len(self.bytes)}", width)
        self.bytes[ref.buffer] = max(self.bytes.get(ref.buffer, 0), self.sizes.nbytes(node))
        self._touch(ref)
        self.places[node] = ref
        return ref

    def _temporary(self, name: str, count: int, dtype: str) -> Ref:
        """A buffer that lives for the launches around it."""
        ref = Ref("arena", f"{name}{len(self.bytes)}", dtype, 0, count)
        self.bytes[ref.buffer] = count * DTYPES[dtype].itemsize
        self._touch(ref)
        return ref

    def _touch(self, ref: Ref | None) -> None:
        if ref is not None and ref.source == "arena" and ref.buffer in self.bytes:
            life = self.life.setdefault(ref.buffer, [self.clock, self.clock])
            life[1] = self.clock

    def _fused_linear(self, node: Node, repeated: bool) -> list[Launch]:
        a = arguments(node)
        tokens = self.sizes.elements(a["x"]) // self.sizes.of(tensor(a["x"]).shape[-1])
        shape = {
            "rows": a["out_features"],
            "columns": self.sizes.of(tensor(a["x"]).shape[-1]),
            "norm": a["prologue"] == "rms_norm",
            "eps": a["eps"],
            "offset": a["offset"],
            "epilogue": {"none": "store"}.get(a["epilogue"], a["epilogue"]),
            "activation": a["activation"] if a["epilogue"] == "glu" else "silu",
            "bias": a["bias"] is not None,
            "out_dtype": _SHORT[a["out_dtype"]],
        }
        info = self.provider.linear(shape, tokens)
        if info is None:
            return self._library_linear(node, a, shape, repeated)
        launches, x = [], self._place(a["x"])
        if info.tile.get("separate_norm"):
            x, launch = self._normed(node, a, x, shape, repeated)
            launches.append(launch)
        out = self._residual_or_new(node, a)
        bound = {
            "x_ptr": x,
            "norm_ptr": self._maybe(a["norm_weight"]),
            "w_ptr": self._place(a["weight"]),
            "bias_ptr": self._maybe(a["bias"]),
            "residual_ptr": self._maybe(a["residual"]),
            "y_ptr": out,
            "num_tokens": self._tokens_name(node),
        }
        return [*launches, self._launch(info, bound, node, repeated)]

    def _normed(
        self, node: Node, a: dict[str, Any], x: Ref, shape: dict[str, Any], repeated: bool
    ) -> tuple[Ref, Launch]:
        """The norm before a linear layer as a kernel of its own, and where it leaves x."""
        tokens = self.sizes.elements(a["x"]) // shape["columns"]
        normed = self._temporary("normed", tokens * shape["columns"], "bfloat16")
        info = self.provider.make(
            "rms_norm",
            columns=shape["columns"],
            eps=shape["eps"],
            offset=shape["offset"],
            weight=a["norm_weight"] is not None,
            count=self._tokens_name(node),
        )
        bound = {"x_ptr": x, "norm_ptr": self._maybe(a["norm_weight"]), "y_ptr": normed}
        return normed, self._launch(info, bound, node, repeated, count=False)

    def _residual_or_new(self, node: Node, a: dict[str, Any]) -> Ref:
        """In place over the residual when nothing reads that later, else a new buffer."""
        residual = a["residual"]
        if residual is None or self._read_later(residual, node):
            return self._new(node)
        place = self._place(residual)
        self.places[node] = place
        return place

    def _read_later(self, value: Node, now: Node) -> bool:
        order = {n: i for i, n in enumerate(self.graph.nodes)}
        return any(order[user] > order[now] for user in value.users)

    def _library_linear(
        self, node: Node, a: dict[str, Any], shape: dict[str, Any], repeated: bool
    ) -> list[Launch]:
        """Norm, matrix product by the library, then the epilogue that the library lacks."""
        if a["bias"] is not None:
            raise UnsupportedModelError(
                "linear layers with a bias have no kernel for many tokens",
                hint="compile for --target cpu",
            )
        launches, x = [], self._place(a["x"])
        tokens = self.sizes.elements(a["x"]) // shape["columns"]
        if shape["norm"]:
            x, launch = self._normed(node, a, x, shape, repeated)
            launches.append(launch)
        glu = shape["epilogue"] == "glu"
        rows = shape["rows"] * (2 if glu else 1)
        wide = self._temporary("wide", tokens * rows, "bfloat16") if glu else None
        out = wide or self._residual_or_new(node, a)
        residual = a["residual"] is not None
        launches.append(self._matmul(node, x, self._place(a["weight"]), out, rows, shape, residual))
        if glu:
            info = self.provider.make(
                "glu",
                columns=shape["rows"],
                activation=shape["activation"],
                count=self._tokens_name(node),
            )
            bound = {"x_ptr": out, "y_ptr": self._new(node)}
            launches.append(self._launch(info, bound, node, repeated, count=False))
        return launches

    def _matmul(
        self, node: Node, x: Ref, w: Ref, out: Ref, rows: int, shape: dict[str, Any], residual: bool
    ) -> Launch:
        """out (+)= x @ w.T through the library."""
        self.clock += 1
        for ref in (x, out):
            self._touch(ref)
        tokens = self._tokens_name(node)
        args = (
            self._argument("x", x, (tokens, shape["columns"])),
            self._argument("w", w, (rows, shape["columns"])),
            self._argument("y", out, (tokens, rows)),
        )
        cost = cost_of(node, self.sizes)
        return Launch(
            kind="library",
            kernel="addmm" if residual else "mm",
            template="",
            tile={},
            grid=(),
            arguments=args,
            outputs=(),
            stream=0,
            dependent=False,
            bytes=cost.bytes,
            flops=cost.flops,
            predicted_us=predict_us(cost, self.target),
        )

    def _rms_norm(self, node: Node, repeated: bool) -> list[Launch]:
        a = arguments(node)
        width = self.sizes.of(tensor(a["x"]).shape[-1])
        info = self.provider.make(
            "rms_norm",
            columns=width,
            eps=a["eps"],
            offset=a["offset"],
            weight=a["weight"] is not None,
            count=self._tokens_name(node),
        )
        bound = {"x_ptr": self._place(a["x"]), "norm_ptr": self._maybe(a["weight"])}
        bound |= {"y_ptr": self._new(node)}
        return [self._launch(info, bound, node, repeated)]

    def _packed_embedding(self, node: Node, repeated: bool) -> list[Launch]:
        a = arguments(node)
        info = self.provider.make("gather", columns=a["hidden"], count="tokens")
        bound = {"ids_ptr": self._place(a["ids"]), "table_ptr": self._place(a["weight"])}
        bound |= {"y_ptr": self._new(node)}
        return [self._launch(info, bound, node, repeated)]

    def _rope_table(self, node: Node, repeated: bool) -> list[Launch]:
        a = arguments(node)
        half = self.sizes.of(tensor(a["inv_freq"]).shape[0])
        info = self.provider.make(
            "rope_table",
            rotary_dim=2 * half,
            scale=a["scaling"],
            out_dtype=_SHORT[a["dtype"]],
            tokens=self.step.tokens,
        )
        out = self._new(node)
        sines = Ref(out.source, out.buffer, out.dtype, self.step.tokens * 2 * half, 2 * half)
        bound = {"position_ids_ptr": self._place(a["position_ids"]), "num_tokens": "tokens"}
        bound |= {"inv_freq_ptr": self._place(a["inv_freq"]), "cos_ptr": out, "sin_ptr": sines}
        return [self._launch(info, bound, node, repeated)]

    def _index(self, node: Node, repeated: bool) -> list[Launch]:
        """Rows that need logits; in a decode step these are all rows."""
        if self.step.kind == "decode":
            self.places[node] = self._place(node.args[0])
            return []
        width = self.sizes.of(tensor(node).shape[-1])
        rows = next(n for n in self.graph.nodes if n.meta.get("input") == "logit_rows")
        info = self.provider.make("gather", columns=width, count="rows")
        bound = {"table_ptr": self._place(node.args[0]), "ids_ptr": self._place(rows)}
        bound |= {"y_ptr": self._new(node)}
        return [self._launch(info, bound, node, repeated)]

    def _attention(self, node: Node, repeated: bool) -> list[Launch]:
        a = arguments(node)
        q, k = tensor(a["q"]), tensor(a["k"])
        shape = {
            "q_heads": self.sizes.of(q.shape[1]),
            "kv_heads": self.sizes.of(k.shape[1]),
            "head_dim": self.sizes.of(q.shape[2]),
            "rotary_dim": self.sizes.of(tensor(a["cos"]).shape[-1]) if a["cos"] is not None else 0,
            "rope_style": a["rope_style"],
            "page_tokens": a["page_tokens"],
            "scale": a["scale"],
            "window": a["window"],
            "softcap": a["softcap"],
            "sinks": a["sinks"] is not None,
            "sequences": self.step.sequences,
            "tokens": self.step.tokens,
            "context": self.step.context,
        }
        refs = {name: self._place(a[name]) for name in ("q", "k", "v")}
        packed = len({ref.buffer for ref in refs.values()}) == 1
        if not packed or len({ref.stride for ref in refs.values()}) != 1:
            raise UnsupportedModelError(
                "q, k and v do not lie in one row", hint="compile for --target cpu"
            )
        shape |= {"row": refs["q"].stride} | {f"{n}_at": ref.offset for n, ref in refs.items()}
        bound: dict[str, Any] = {"row_ptr": replace(refs["q"], offset=0)}
        bound |= {f"{n}_ptr": self._maybe(a[n]) for n in ("cos", "sin", "sinks")}
        bound |= {f"{n}_ptr": self._input(self._step_input(n)) for n in _BATCH}
        bound |= {"kv_ptr": self._pool(a), "out_ptr": self._new(node)}
        bound |= {"q_ptr": bound["row_ptr"], "q_out_ptr": bound["row_ptr"]}
        bound |= {"num_tokens": "tokens", "num_sequences": "sequences"}
        bound |= {"table_width": "sequence_pages"}
        launches = []
        for index, info in enumerate(self.provider.attention(shape, self.step.kind)):
            if any(name == "weight_ptr" for name, _ in info.arguments) and not index:
                bound["partial_ptr"] = self._temporary("part", info.num_partials, "float32")
                bound["weight_ptr"] = self._temporary("share", info.num_counters, "float32")
                bound["num_splits"] = float(info.tile["splits"])
            launches.append(self._launch(info, bound, node, repeated, count=index == 0))
        return launches

    def _pool(self, a: dict[str, Any]) -> Ref:
        """The pages of a layer in a pool [layers, pages, 2, kv_heads, page_tokens, head_dim]."""
        pool, count = tensor(a["kv"]), self.kv_pages
        for size in pool.shape[2:]:
            count *= self.sizes.of(size)
        dtype = str(pool.dtype).removeprefix("torch.")
        return Ref("kv", a["kv"].meta["input"], dtype, 0, 0, count * pool.dtype.itemsize)

    def _step_input(self, name: str) -> Node:
        return next(n for n in self.graph.nodes if n.meta.get("input") == name)

    # --- launches -----------------------------------------------------------------------------

    def _maybe(self, node: Node | None) -> Ref | None:
        return None if node is None else self._place(node)

    def _tokens_name(self, node: Node) -> str:
        """The name of the size that counts the rows of a node."""
        names = [self.symbols.get(str(size), "") for size in tensor(node).shape]
        return "rows" if "rows" in names else "tokens"

    def _launch(
        self,
        info: KernelInfo,
        bound: dict[str, Any],
        node: Node,
        repeated: bool,
        count: bool = True,
    ) -> Launch:
        self.clock += 1
        if any(name == "counter_ptr" for name, _ in info.arguments):
            self.scratch["partials"] = max(self.scratch["partials"], info.num_partials)
            self.scratch["counters"] = max(self.scratch["counters"], info.num_counters)
            bound = bound | {
                "partial_ptr": Ref("arena", "partials", "float32", 0, 0),
                "counter_ptr": Ref("arena", "counters", "int32", 0, 0),
            }
        args = []
        for name, kind in info.arguments:
            value = bound[name]
            if isinstance(value, Ref):
                self._touch(value)
                args.append(self._argument(name, value, ()))
            elif isinstance(value, str):
                args.append(Argument(name, "size", value, kind, ()))
            elif isinstance(value, float):
                args.append(Argument(name, "scalar", "", kind, (), value))
            else:
                raise GraphError(f"kernel {info.template} wants {name}, which nothing gives")
        self.out.keys[info.key] = info
        cost = cost_of(node, self.sizes) if count else Cost(0, 0, "bfloat16")
        return Launch(
            kind="kernel",
            kernel=info.key,
            template=info.template,
            tile=info.tile,
            grid=info.grid,
            arguments=tuple(args),
            outputs=(),
            stream=0,
            dependent=info.dependent,
            bytes=cost.bytes,
            flops=cost.flops,
            predicted_us=predict_us(cost, self.target),
        )

    def _argument(self, name: str, ref: Ref, shape: tuple[int | str, ...]) -> Argument:
        item = DTYPES[ref.dtype].itemsize
        buffer = ref.buffer
        if ref.source == "weight":
            parts = ["{layer}" if part.isdigit() else part for part in buffer.split(".")]
            buffer = ".".join(parts)
        return Argument(
            name, ref.source, buffer, ref.dtype, shape, None, ref.offset * item, ref.layer_stride
        )

    def _finish(self) -> None:
        """Logits as an argument, and every buffer with its lifetime."""
        output = self._place(self.graph.output_node().args[0])
        width = self.sizes.of(tensor(self.graph.output_node().args[0]).shape[-1])
        self.clock += 1
        self._touch(output)
        self.out.logits = self._argument("logits", output, ("rows", width))
        for name, nbytes in self.bytes.items():
            first, last = self.life[name]
            self.out.buffers.append(ArenaBuffer(name, "uint8", (nbytes,), 0, nbytes, first, last))
        for name, dtype in (("partials", "float32"), ("counters", "int32")):
            if count := self.scratch[name]:
                size = count * 4
                self.out.buffers.append(ArenaBuffer(name, dtype, (count,), 0, size, 0, self.clock))


_BATCH = ("block_table", "query_start", "context_lens")
