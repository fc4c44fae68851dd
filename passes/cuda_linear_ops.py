"""Linear layers in a CUDA schedule: one kernel of ours, or a library product and what follows."""

from typing import Any

from sitsc.core.errors import UnsupportedModelError
from sitsc.core.kernels import KernelInfo
from sitsc.core.weights import DTYPES
from sitsc.passes.cuda_norm_ahead import NormAheadOps, scales
from sitsc.passes.cuda_parts import in_parts
from sitsc.passes.cuda_pointwise import unsupported
from sitsc.passes.cuda_refs import Ref
from sitsc.passes.fxutil import arguments, is_op, module_path, tensor, weight_of

Node = Any
SHORT = {"bfloat16": "bf16", "float32": "fp32"}


class LinearOps(NormAheadOps):
    """Launches of sitsc::fused_linear."""

    def fused_linear(self, node: Node) -> None:
        """By the kernel that the provider gives, or by the library."""
        a = arguments(node)
        ahead, found = self.norm_ahead(node), self.scaled_for(node)
        shape, info = self.asked_for(node, parts=self.takes_parts(node), ahead=ahead)
        x = self.rows(a["x"])
        if found is not None:
            del self.scaled[x.buffer]
        if info is None:
            self._by_library(node, a, shape, x)
            return
        scale: Ref | None = None
        if found is not None:
            x, scale = found.rows, found.squares
        elif blocks := info.tile.get("separate_norm", 0):
            x, scale = self._normed(node, a, x, blocks)
        if self.reduced(node) and not in_parts(info):
            self.product_of_ours(node, info, x, scale)
            return
        if in_parts(info):
            bound = self.operands(node, x) | {"squares_ptr": scale}
            self.leave_parts(node, info, bound)
            return
        residual = None if a["residual"] is None else self.rows(a["residual"])
        out = self._output(node, a, [x])
        bound = self.operands(node, x) | {
            "norm_ptr": self._maybe(a["norm_weight"]),
            "squares_ptr": scale,
            "bias_ptr": self._maybe(a["bias"]),
            "residual_ptr": residual,
            "y_ptr": out,
        }
        bound |= self.leave_scaled(node, info, out) if scales(info) else {}
        self.kernel(info, bound, node)

    def asked_for(
        self, node: Node, *, parts: bool, ahead: Node | None = None
    ) -> tuple[dict[str, Any], KernelInfo | None]:
        """The shape of a linear layer and the kernel that the provider gives for it."""
        a = arguments(node)
        columns = self.sizes.of(tensor(a["x"]).shape[-1])
        tokens = self.sizes.elements(a["x"]) // columns
        shape = self._linear_shape(node, a, columns)
        apart = shape["norm"] and is_op(a["x"], "all_reduce")
        found = self.scaled_for(node)
        info = self.provider.linear(
            shape,
            tokens,
            parts=parts,
            norm_apart=apart,
            squares=0 if found is None else found.count,
            ahead=None if ahead is None else arguments(ahead)["offset"],
        )
        if info is not None and not in_parts(info) and self.reduced(node):
            shape |= {"out_dtype": "fp32"}
            info = self.provider.linear(shape, tokens, squares=0 if found is None else found.count)
        return shape, info

    def _linear_shape(self, node: Node, a: dict[str, Any], columns: int) -> dict[str, Any]:
        kind = SHORT[str(tensor(a["x"]).dtype).removeprefix("torch.")]
        norm = a["prologue"] == "rms_norm"
        if a["weight"].meta["weight"].dtype != "bfloat16" or (kind == "fp32" and not norm):
            raise UnsupportedModelError(
                "a linear layer of other types than bfloat16 has no CUDA kernel",
                where=module_path(node),
                hint="compile for --target cpu",
            )
        shape = {
            "rows": a["out_features"],
            "columns": columns,
            "norm": norm,
            "eps": a["eps"],
            "offset": a["offset"],
            "epilogue": {"none": "store"}.get(a["epilogue"], a["epilogue"]),
            "activation": a["activation"] if a["epilogue"] == "glu" else "silu",
            "bias": a["bias"] is not None,
            "out_dtype": SHORT[a["out_dtype"]],
        }
        return shape | ({"x_dtype": kind} if kind == "fp32" else {})

    def _output(self, node: Node, a: dict[str, Any], reads: list[Ref]) -> Ref:
        """In place over the residual where that is free, or where the next layer expects it."""
        return self.destination(node, reads, [] if a["residual"] is None else [a["residual"]])

    def _normed(
        self, node: Node, a: dict[str, Any], x: Ref, blocks: int = 1
    ) -> tuple[Ref, Ref | None]:
        """The norm before a linear layer as a kernel of its own, and where it leaves x.

        With several `blocks` a row, also where sums of squares are from which 1 / rms is to come.
        """
        normed, squares = self.temporary("normed", x.shape, "bfloat16"), None
        shape = {"columns": x.shape[-1], "eps": a["eps"], "offset": a["offset"]}
        if x.dtype != "bfloat16":
            shape["x_dtype"] = SHORT[x.dtype]
        weight = self._maybe(a["norm_weight"])
        bound = {"x_ptr": x, "norm_ptr": weight, "y_ptr": normed}
        if blocks > 1:
            squares = self.temporary("squares", (*x.shape[:-1], blocks), "float32")
            bound, shape = bound | {"squares_ptr": squares}, shape | {"blocks": blocks}
        sums = self.added(x)
        if sums is not None and sums.ranks > 1:
            self.sum_of_ranks(node, x, sums, bound, shape)
            return normed, squares
        if sums is not None:
            assert sums.base is not None
            bound |= {"x_ptr": sums.base, "parts_ptr": sums.parts, "sum_ptr": x}
            shape |= {"parts": sums.count, "parts_dtype": SHORT[sums.parts.dtype]}
        info = self.provider.make(
            "rms_norm", **shape, weight=weight is not None, count=self.count(node)
        )
        self.kernel(info, bound, node, counted=False)
        return normed, squares

    def _by_library(self, node: Node, a: dict[str, Any], shape: dict[str, Any], x: Ref) -> None:
        """Norm, matrix product by the library, then the epilogue that the library lacks."""
        if shape["norm"]:
            x, _ = self._normed(node, a, x)
        glu, weight = a["epilogue"] == "glu", self.place(a["weight"])
        rows = a["out_features"] * (2 if glu else 1)
        if a["bias"] is not None:
            wide = self.temporary("wide", (*x.shape[:-1], rows), "float32")
            self.product(node, x, weight, wide, rows, kernel="mm")
            self.epilogue(node, a, wide.rows(), self._output(node, a, []))
            return
        if not glu:
            self._product_over(node, a, x, weight, rows)
            return
        wide = self.temporary("wide", (*x.shape[:-1], rows), "bfloat16")
        self.product(node, x, weight, wide, rows, kernel="mm")
        kind = {"columns": a["out_features"], "activation": a["activation"]}
        info = self.provider.make("glu", **kind, count=self.count(node))
        bound = {"x_ptr": wide, "y_ptr": self._output(node, a, [])}
        self.kernel(info, bound, node, counted=False)

    def _product_over(self, node: Node, a: dict[str, Any], x: Ref, w: Ref, rows: int) -> None:
        """The product, added to the residual by the next norm, in its place or to a copy of it."""
        if self.reduced(node) and not self.waiting:
            self.product_of_library(node, x, w, rows)
            return
        if a["residual"] is not None and self.product_apart(node, x, w, rows):
            return
        out = self._output(node, a, [x])
        add = a["residual"] is not None
        if add and not self.rows(a["residual"]).same_elements(out):
            self.copy(a["residual"], out, node)
        self.product(node, x, w, out, rows, kernel="addmm" if add else "mm")

    def addmm(self, node: Node) -> None:
        """bias + x @ w with a weight of [columns, rows], by the library at any number of tokens."""
        bias, x, weight = node.args[:3]
        known = weight_of(weight) is not None and weight_of(bias) is not None
        if node.kwargs or not known or tensor(weight).dtype != DTYPES["bfloat16"]:
            raise unsupported(node)
        rows, place = int(tensor(weight).shape[1]), self.rows(x)
        wide = self.temporary("wide", (*place.shape[:-1], rows), "float32")
        self.product(node, place, self.place(weight), wide, rows, kernel="mm_kn")
        a = {"bias": bias, "epilogue": "none", "residual": None}
        self.epilogue(node, a, wide.rows(), self.destination(node, [], []))

    def _maybe(self, node: Node | None) -> Ref | None:
        return None if node is None else self.place(node)
