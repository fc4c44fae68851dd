"""Mixture-of-experts layers in a CUDA schedule: route, sort, grouped products, weighted sum."""

from typing import Any

from sitsc.core.weights import dtype_name
from sitsc.passes.cuda_linear_ops import SHORT, LinearOps
from sitsc.passes.cuda_pointwise import unsupported
from sitsc.passes.cuda_refs import Ref
from sitsc.passes.fxutil import arguments, spec_of, tensor

Node = Any
# Above this many tokens the rows between the last product and the sum are bfloat16: twice as fast.
_EXACT_TOKENS = 64


class ExpertOps(LinearOps):
    """Launches of sitsc::moe."""

    def moe(self, node: Node) -> None:
        """Five kernels; tokens are sorted by expert between the router and the products."""
        a = arguments(node)
        self._check_types(node, a)
        x, logits = self.rows(a["x"]), self.rows(a["logits"])
        hidden, experts = x.shape[-1], int(tensor(a["down"]).shape[0])  # of this rank
        tokens, top_k, count = _rows_of(x), a["top_k"], self.count(node)
        pairs = tokens * top_k
        share = self.temporary("share", (pairs,), "float32")
        chosen = self.temporary("chosen", (pairs,), "int32")
        self._route(node, a, logits, share, chosen)
        start = self.temporary("start", (experts + 1,), "int32")
        pair = self.temporary("pair", (pairs,), "int32")
        info = self.provider.make("moe_sort", experts=experts, top_k=top_k)
        bound = {"chosen_ptr": chosen, "start_ptr": start, "pair_ptr": pair, "num_tokens": count}
        self.kernel(info, bound, node, counted=False)
        wide = "float32" if self.step.tokens <= _EXACT_TOKENS else "bfloat16"
        act = self.temporary("act", (pairs, a["intermediate"]), "bfloat16")
        sizes = {"experts": experts, "top_k": top_k, "tokens": self.step.tokens}
        up = {"rows": a["intermediate"], "columns": hidden, "glu": True} | sizes
        up |= {name: a[name] for name in ("activation", "alpha", "limit")}
        sorted_by = {"start_ptr": start, "pair_ptr": pair}
        self._product(node, up, a["gate_up"], a["gate_up_bias"], x, act, sorted_by, counted=True)
        y = self.temporary("each", (pairs, hidden), wide)
        down = {"rows": hidden, "columns": a["intermediate"], "out_dtype": SHORT[wide]} | sizes
        self._product(node, down, a["down"], a["down_bias"], act, y, sorted_by, counted=False)
        self._sum(node, a, y, share)

    def _check_types(self, node: Node, a: dict[str, Any]) -> None:
        """Raises UnsupportedModelError for what no kernel reads."""
        kinds = {dtype_name(tensor(a["x"]).dtype)}
        kinds |= {spec_of(a[name]).dtype for name in ("gate_up", "down")}
        kinds |= {spec_of(a[n]).dtype for n in ("gate_up_bias", "down_bias") if a[n] is not None}
        if kinds != {"bfloat16"}:
            raise unsupported(node, "for experts of other types than bfloat16")
        if a["correction"] is not None and tensor(a["correction"]).dtype.itemsize != 4:
            raise unsupported(node, "for a correction that is not float32")

    def _route(self, node: Node, a: dict[str, Any], logits: Ref, share: Ref, chosen: Ref) -> None:
        names = ("top_k", "scoring", "groups", "group_top", "normalise", "scaling")
        info = self.provider.make(
            "moe_route",
            **{name: a[name] for name in names},
            experts=logits.shape[-1],
            correction=a["correction"] is not None,
            mine=0 if a["first"] is None else int(tensor(a["down"]).shape[0]),
            logits_dtype=SHORT[logits.dtype],
            count=self.count(node),
        )
        bound = {"logits_ptr": logits, "share_ptr": share, "chosen_ptr": chosen}
        bound |= {f"{name}_ptr": self._maybe(a[name]) for name in ("correction", "first")}
        self.kernel(info, bound, node, counted=False)

    def _product(
        self,
        node: Node,
        shape: dict[str, Any],
        weight: Node,
        bias: Node | None,
        x: Ref,
        y: Ref,
        sorted_by: dict[str, Ref],
        *,
        counted: bool,
    ) -> None:
        info = self.provider.make("moe_linear", **shape, bias=bias is not None)
        bound = {"x_ptr": x, "w_ptr": self.place(weight), "bias_ptr": self._maybe(bias), "y_ptr": y}
        self.kernel(info, bound | sorted_by, node, counted=counted)

    def _sum(self, node: Node, a: dict[str, Any], y: Ref, share: Ref) -> None:
        residual = None if a["residual"] is None else self.rows(a["residual"])
        over = [] if a["residual"] is None else [a["residual"]]
        out = self.place_to_sum(node) or self.destination(node, [y, share], over)
        info = self.provider.make(
            "moe_sum",
            columns=y.shape[-1],
            top_k=a["top_k"],
            residual=residual is not None,
            some=a["first"] is not None,
            y_dtype=SHORT[y.dtype],
            out_dtype=SHORT[dtype_name(tensor(node).dtype)],
            count=self.count(node),
        )
        bound = {"y_ptr": y, "share_ptr": share, "residual_ptr": residual, "out_ptr": out}
        self.kernel(info, bound, node, counted=False)


def _rows_of(ref: Ref) -> int:
    rows = 1
    for size in ref.shape[:-1]:
        rows *= size
    return rows
