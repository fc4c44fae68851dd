"""Operators with kernels of their own in a CUDA schedule: norms, embeddings, tables, attention."""

from dataclasses import replace
from typing import Any

from sitsc.core.weights import DTYPES, dtype_name
from sitsc.passes.cuda_elementwise import constant
from sitsc.passes.cuda_experts import ExpertOps
from sitsc.passes.cuda_linear_ops import SHORT
from sitsc.passes.cuda_pointwise import unsupported
from sitsc.passes.cuda_refs import Ref, packed, side_by_side
from sitsc.passes.fxutil import arguments, is_op, layer_of, tensor

Node = Any
_BATCH = ("block_table", "query_start", "context_lens")


class KernelOps(ExpertOps):
    """Launches of operators that have a kernel of their own."""

    def rms_norm(self, node: Node) -> None:
        """RMS norm of rows or of the heads in them, over themselves where nothing reads them."""
        a = arguments(node)
        shape = {"kind": "rms", "eps": a["eps"], "offset": a["offset"]}
        self._norm(node, a["x"], a["weight"], None, shape)

    def layer_norm(self, node: Node) -> None:
        """Layer norm over the last dimension."""
        a = arguments(node)
        if len(a["normalized_shape"]) != 1:
            raise unsupported(node, "over several dimensions")
        shape = {"kind": "layer", "eps": a["eps"], "offset": 0.0}
        self._norm(node, a["input"], a["weight"], a["bias"], shape)

    def _norm(
        self, node: Node, x: Node, weight: Node | None, bias: Node | None, shape: dict[str, Any]
    ) -> None:
        ref = self.place(x)
        if (steps := _row_steps(ref, tensor(x).shape)) is None:
            ref = self.rows(x)
            steps = _row_steps(ref, tensor(x).shape)
        if steps is None or tensor(x).dtype != tensor(node).dtype:
            raise unsupported(node, f"over {tuple(tensor(x).shape)}")
        out = self.destination(node, [], [x], strided=True)
        to = _row_steps(out, tensor(node).shape)
        assert to is not None
        heads, row, head = steps
        info = self.provider.make(
            "row_norm",
            columns=ref.shape[-1],
            heads=heads,
            x=(ref.offset, row, head),
            y=(out.offset, to[1], to[2]),
            dtypes=tuple(
                None if v is None else SHORT[v] for v in (ref.dtype, _dtype(weight), _dtype(bias))
            ),
            **shape,
            count=self.count(node) or 1,
        )
        bound = {"x_ptr": replace(ref, offset=0), "y_ptr": replace(out, offset=0)}
        bound |= {"weight_ptr": self._maybe(weight), "bias_ptr": self._maybe(bias)}
        self.kernel(info, bound, node)

    def packed_embedding(self, node: Node) -> None:
        """Rows of a table, times the constant that the model multiplies them by next."""
        a = arguments(node)
        scaled, scale = _scaled(node)
        kind = {"out_dtype": SHORT[a["dtype"]]} if a["dtype"] != "bfloat16" else {}
        if a["weight"].meta["weight"].dtype != "bfloat16" or a["scale"] is not None:
            raise unsupported(node, "for this type of table")
        out = self.new(scaled)
        sums = self.embedded_parts(scaled, out)
        if sums is not None:
            kind |= {"clear": sums.count, "parts_dtype": SHORT[sums.parts.dtype]}
        shape, more = ({}, {}) if sums is not None else self.scaled_first(scaled, out)
        info = self.provider.make(
            "gather", columns=a["hidden"], scale=scale, count=self.count(node), **kind, **shape
        )
        bound = {"ids_ptr": self.rows(a["ids"]), "table_ptr": self.place(a["weight"])}
        bound |= {"y_ptr": out} if sums is None else {"y_ptr": out, "parts_ptr": sums.parts}
        self.kernel(info, bound | more, node)
        if sums is not None:
            self.waiting[out.buffer] = sums

    def rope_table(self, node: Node) -> None:
        """Cosines and sines of the step's positions."""
        a = arguments(node)
        half = self.sizes.of(tensor(a["inv_freq"]).shape[0])
        info = self.provider.make(
            "rope_table",
            rotary_dim=2 * half,
            scale=a["scaling"],
            out_dtype=SHORT[a["dtype"]],
            tokens=self.step.tokens,
        )
        out = self.new(node, in_order=True)
        sines = replace(out, offset=out.strides[0])
        bound = {"position_ids_ptr": self.place(a["position_ids"]), "num_tokens": "tokens"}
        bound |= {"inv_freq_ptr": self.place(a["inv_freq"]), "cos_ptr": out, "sin_ptr": sines}
        self.kernel(info, bound, node)

    def selection(self, node: Node) -> None:
        """Rows that need logits; in a decode step these are all rows."""
        if self.step.kind == "decode":
            if (place := self.resolve(node.args[0])) is not None:
                self.places[node] = place
            return
        kind = SHORT.get(dtype_name(tensor(node).dtype))
        if kind is None:
            self.store(node)
            return
        types = {} if kind == "bf16" else {"table_dtype": kind, "out_dtype": kind}
        columns = int(tensor(node).shape[-1])
        info = self.provider.make("gather", columns=columns, count="rows", **types)
        rows = self._step_input("logit_rows")
        bound = {"table_ptr": self.rows(node.args[0]), "ids_ptr": self.place(rows)}
        self.kernel(info, bound | {"y_ptr": self.new(node)}, node)

    def paged_attention(self, node: Node) -> None:
        """Attention over the pages of a layer; q, k and v side by side in one row, or put there."""
        a = arguments(node)
        q, k = tensor(a["q"]), tensor(a["k"])
        rotary = 0 if a["cos"] is None else int(tensor(a["cos"]).shape[-1])
        shape = {
            "q_heads": int(q.shape[1]),
            "kv_heads": int(k.shape[1]),
            "head_dim": int(q.shape[2]),
            "rotary_dim": rotary,
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
        if a["cos"] is not None:
            shape["angle_dtype"] = SHORT[dtype_name(tensor(a["cos"]).dtype)]
        bound: dict[str, Any] = {"row_ptr": self._row(node, a)}
        if (parts := self.row_parts.get(bound["row_ptr"].buffer)) is not None:
            shape["row_parts"] = parts
        bound |= {f"{n}_ptr": self.rows(a[n]) for n in ("cos", "sin", "sinks") if a[n] is not None}
        bound |= {f"{n}_ptr": self.place(self._step_input(n)) for n in _BATCH}
        bound |= {"kv_ptr": self._pool(a), "out_ptr": self.new(node)}
        bound |= {"q_ptr": bound["row_ptr"], "q_out_ptr": bound["row_ptr"]}
        bound |= {"num_tokens": "tokens", "num_sequences": "sequences"}
        bound |= {"table_width": "sequence_pages"} | self._maps(shape, bound)
        kernels = self.provider.attention(shape, self.step.kind)
        reads = next(i for i, info in enumerate(kernels) if info.template.startswith("attention"))
        for index, info in enumerate(kernels):
            if any(name == "weight_ptr" for name, _ in info.arguments) and not index:
                bound["partial_ptr"] = self.temporary("part", (info.num_partials,), "float32")
                bound["weight_ptr"] = self.temporary("share", (info.num_counters,), "float32")
                bound["num_splits"] = float(info.tile["splits"])
            self.kernel(info, bound, node, counted=index == reads)

    def _row(self, node: Node, a: dict[str, Any]) -> Ref:
        """The packed row [q | k | v] of a token; kernels may change it."""
        parts = [a[name] for name in ("q", "k", "v")]
        if any(tensor(part).dtype != DTYPES["bfloat16"] for part in parts):
            raise unsupported(node, "for other types than bfloat16")
        refs = [self.resolve(part) for part in parts]
        if not side_by_side(refs) or not self._unread(refs, node):
            return self.packed_row(node, parts)
        return replace(refs[0], offset=0)

    def _unread(self, refs: list[Ref], node: Node) -> bool:
        """Whether the kernels of a prefill step may turn q in its place."""
        return self.step.kind == "decode" or self.free(refs[0], node)

    def _pool(self, a: dict[str, Any]) -> Ref:
        """The pages of a layer in a pool [layers, pages, 2, kv_heads, page_tokens, head_dim]."""
        pool, count = tensor(a["kv"]), self.kv_pages
        for size in pool.shape[2:]:
            count *= self.sizes.of(size)
        stride = count * pool.dtype.itemsize
        return Ref("kv", a["kv"].meta["input"], dtype_name(pool.dtype), layer_stride=stride)

    def _maps(self, shape: dict[str, Any], bound: dict[str, Any]) -> dict[str, Ref]:
        """Rows and pages as dense tensors, for kernels that copy tiles of them."""
        heads, dim = shape["q_heads"] + 2 * shape["kv_heads"], shape["head_dim"]
        rows = 2 * shape["kv_heads"] * shape["page_tokens"] * self.kv_pages
        sizes = {"row_ptr": (shape["tokens"], heads, dim), "kv_ptr": (rows, dim)}
        q_map, kv_map = (
            replace(bound[name], shape=size, strides=packed(size, None))
            for name, size in sizes.items()
        )
        return {"q_map": q_map, "kv_map": kv_map}

    def _step_input(self, name: str) -> Node:
        return next(n for n in self.graph.nodes if n.meta.get("input") == name)


def _dtype(node: Node | None) -> str | None:
    return None if node is None else dtype_name(tensor(node).dtype)


def _row_steps(ref: Ref, shape: Any) -> tuple[int, int, int] | None:
    """(heads, elements from row to row, from head to head) of rows of heads; None for others."""
    if ref.shape and ref.strides[-1] not in (1,) and ref.shape[-1] != 1:
        return None
    outer = [
        (size, stride, isinstance(n, int))
        for size, stride, n in zip(ref.shape[:-1], ref.strides[:-1], shape[:-1], strict=True)
        if not (isinstance(n, int) and size == 1)
    ]
    row = next((stride for _, stride, fixed in outer if not fixed), 0)
    heads = [(size, stride) for size, stride, fixed in outer if fixed]
    if len(heads) > 1:
        return None
    size, stride = heads[0] if heads else (1, 0)
    return size, row, stride


def _scaled(node: Node) -> tuple[Node, float]:
    """The product of an embedding with a constant when nothing else reads the embedding."""
    users = list(node.users)
    if len(users) == 1 and is_op(users[0], "mul") and layer_of(users[0]) == layer_of(node):
        others = [arg for arg in users[0].args if arg is not node]
        number = constant(others[0]) if len(others) == 1 else None
        if number is not None and tensor(users[0]).dtype == tensor(node).dtype:
            return users[0], number
    return node, 1.0
