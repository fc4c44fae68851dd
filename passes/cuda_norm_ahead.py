"""Norms made ahead: a residual layer scales its sum for the norm that reads it first.

In: residual layers whose tile says `scaled`. Out: launches that leave, beside the sum, its rows
times the norm's weight and sums of their squares; the reader multiplies by 1 / rms, and the norm
has no launch. In layers that repeat, the last layer's sum is scaled with the next one's weight.
"""

from dataclasses import dataclass, replace
from typing import Any

from sitsc.core.kernels import KernelInfo
from sitsc.core.layer_names import open_name
from sitsc.passes.cuda_collectives import RankOps
from sitsc.passes.cuda_refs import Ref, packed
from sitsc.passes.fxutil import arguments, is_op, weight_of

Node = Any


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows times a norm's weight, and `count` sums of squares a row, for the reader of a value."""

    rows: Ref
    squares: Ref
    count: int


def scales(info: KernelInfo | None) -> bool:
    """Whether a kernel leaves its sum scaled as well."""
    return info is not None and any(name == "scaled_ptr" for name, _ in info.arguments)


class NormAheadOps(RankOps):
    """Keeps track of values that are scaled for the norm which reads them."""

    def reset(self) -> None:
        """Forget everything that was scheduled."""
        super().reset()
        self.scaled: dict[str, Scaled] = {}
        self.unscaled: set[Node] = set()
        self.twins: dict[Node, list[Node]] = {}
        self._scaled_before: dict[str, Scaled] = {}

    # --- who may ------------------------------------------------------------------------------

    def norm_ahead(self, node: Node) -> Node | None:
        """The layer whose norm a residual layer can make, if it reads the sum before all others."""
        a = arguments(node)
        if a["epilogue"] != "residual" or node in self.unscaled or self.waiting or self.scaled:
            return None
        reader = self._normed_by(node)
        if reader is None or not self._same_weights(node, reader):
            return None
        _, info = self.asked_for(reader, parts=False)
        return reader if info is not None and info.template != "wide" else None

    def _normed_by(self, node: Node) -> Node | None:
        """The first reader of a value, where that is a layer with a norm of it."""
        readers = sorted(self.values.readers(node), key=self.values.order.__getitem__)
        if not readers or not is_op(readers[0], "fused_linear"):
            return None
        a = arguments(readers[0])
        normed = a["prologue"] == "rms_norm" and a["norm_weight"] is not None
        return readers[0] if normed and a["x"] is node and a["residual"] is not node else None

    def _same_weights(self, node: Node, reader: Node) -> bool:
        """Whether the norm's weight has one name in all layers that repeat, but for the layer."""
        named = self._norm_name(node, reader)
        readers = [(twin, self._normed_by(twin)) for twin in self.twins.get(node, [])]
        return all(r is not None and self._norm_name(n, r) == named for n, r in readers)

    def _norm_name(self, node: Node, reader: Node) -> tuple[str, bool]:
        norm = self._norm_of(node, reader)
        layer = self.values.layer[node]
        named = layer is not None
        name = open_name(norm.buffer, layer, following=norm.following) if named else norm.buffer
        return name, norm.following

    def _norm_of(self, node: Node, reader: Node) -> Ref:
        """The weight of the reader's norm; it may be the next layer's."""
        spec = weight_of(arguments(reader)["norm_weight"])
        assert spec is not None
        place = Ref("weight", spec.name, spec.dtype, 0, spec.shape, packed(spec.shape, None))
        here, there = self.values.layer[node], self.values.layer[reader]
        return replace(place, following=here is not None and there == here + 1)

    # --- leaving and reading ------------------------------------------------------------------

    def leave_scaled(self, node: Node, info: KernelInfo, out: Ref) -> dict[str, Any]:
        """What a kernel that scales is bound to, besides."""
        reader = self._normed_by(node)
        assert reader is not None
        left = self._scaled_places(out, info.tile["scaled"])
        self.scaled[out.buffer] = left
        bound = {"scaled_ptr": left.rows, "scaled_squares_ptr": left.squares}
        return bound | {"next_norm_ptr": self._norm_of(node, reader)}

    def scaled_for(self, node: Node) -> Scaled | None:
        """What a layer with a norm finds in the place of it."""
        a = arguments(node)
        place = self.resolve(a["x"]) if a["prologue"] == "rms_norm" else None
        return self.scaled.get(place.buffer) if isinstance(place, Ref) else None

    def _scaled_places(self, x: Ref, count: int) -> Scaled:
        """Rows and squares for a value, the same for all values of a step."""
        rows, width = x.rows().shape
        self.scratch["scaled"] = max(self.scratch["scaled"], -(-rows * width // 2))  # words
        self.scratch["squares"] = max(self.scratch["squares"], rows * count)
        shapes = ((rows, width), (rows, count))
        normed, squares = (
            Ref("arena", name, dtype, 0, shape, packed(shape, None))
            for name, dtype, shape in zip(
                ("scaled", "squares"), ("bfloat16", "float32"), shapes, strict=True
            )
        )
        return Scaled(normed, squares, count)

    # --- repeated layers ----------------------------------------------------------------------

    def scaled_first(self, node: Node, out: Ref) -> tuple[dict[str, Any], dict[str, Any]]:
        """The shape and arguments for a value before repeated layers that is scaled as theirs are.

        Both empty where they scale nothing.
        """
        theirs, reader = self.following.get(node), self._normed_by(node)
        if theirs is None or reader is None or not is_op(theirs, "fused_linear"):
            return {}, {}
        ahead = self.norm_ahead(theirs)
        info = None if ahead is None else self.asked_for(theirs, parts=False, ahead=ahead)[1]
        if info is None or not scales(info):
            return {}, {}
        a, left = arguments(reader), self._scaled_places(out, info.tile["scaled"])
        self.scaled[out.buffer] = left
        bound = {"scaled_ptr": left.rows, "squares_ptr": left.squares}
        bound |= {"norm_ptr": self.place(a["norm_weight"])}
        return {"scaled": left.count, "offset": a["offset"]}, bound

    def begin_layers(self) -> dict[str, Any]:
        """Like that of parts: where the first of repeated layers finds no scaled rows, none do."""
        for theirs, ours in self.carried.items():
            ref = self.resolve(ours)
            if isinstance(ref, Ref) and ref.buffer not in self.scaled:
                self.unscaled.add(theirs)
        self._scaled_before = dict(self.scaled)
        return super().begin_layers()

    def same_parts(self, before: dict[str, Any]) -> bool:
        """Whether a later layer finds the same to add, and the same scaled, as the first."""
        return self.scaled == self._scaled_before and super().same_parts(before)
