"""Checks of the mixture-of-experts kernels: the router, and a whole layer of five launches."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from sitsc.codegen.cuda_experts import tile as rule
from sitsc.codegen.cuda_templates import Sizes, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.ops.moe import experts_reference, route_reference
from tests.kernel_checks import BF16, TYPES, Check, Inputs, Prepared, Tile, launch


@dataclass(frozen=True)
class Experts:
    """One layer."""

    experts: int
    top_k: int
    hidden: int
    inter: int
    bias: bool = False
    activation: str = "silu"
    residual: bool = True
    route: dict[str, Any] = field(default_factory=dict)

    @property
    def router(self) -> dict[str, Any]:
        given = {"scoring": "softmax", "groups": 1, "group_top": 1, "normalise": 1, "scaling": 1.0}
        return given | self.route


@dataclass(frozen=True)
class ExpertsCheck:
    """A layer over `tokens` tokens; both products take `tile`, or the rule for an H200 without it.

    `idle` rows belong to the bucket but not to the step.
    """

    op: Experts
    tokens: int
    tile: Tile = field(default_factory=dict)
    idle: int = 0
    correction: bool = False
    y_dtype: str = "fp32"

    def sources(self, pdl: bool) -> list[KernelSource]:
        op, most = self.op, self.tokens + self.idle
        sizes = {"experts": op.experts, "top_k": op.top_k}
        more = sizes | {"tokens": most, "bias": op.bias, "pdl": pdl}
        gate = {"activation": op.activation, "alpha": 1.702, "limit": 0.7}
        return [
            instance("moe_route", **sizes, **op.router, correction=self.correction, pdl=pdl),
            instance("moe_sort", **sizes, block=16 if most < 64 else 512, pdl=pdl),
            instance("moe_linear", **self._product(most, True), **gate, **more),
            instance("moe_linear", **self._product(most, False), out_dtype=self.y_dtype, **more),
            instance(
                "moe_sum",
                columns=op.hidden,
                top_k=op.top_k,
                residual=op.residual,
                y_dtype=self.y_dtype,
                pdl=pdl,
            ),
        ]

    def _product(self, most: int, glu: bool) -> dict[str, Any]:
        """Shape and tile of one product."""
        sizes = (self.op.inter, self.op.hidden) if glu else (self.op.hidden, self.op.inter)
        shape = {"rows": sizes[0], "columns": sizes[1], "glu": glu}
        counts = {"tokens": most, "top_k": self.op.top_k, "experts": self.op.experts}
        return shape | (self.tile or rule(shape | counts, 132, 232448))

    def prepare(self, device: str, pdl: bool) -> Prepared:
        make, op, t = Inputs(device), self.op, self.tokens
        pairs = (t + self.idle) * op.top_k
        values: dict[str, Any] = {
            "logits_ptr": make.normal(t, op.experts),
            "correction_ptr": make.normal(op.experts, dtype=torch.float32, scale=0.3),
            "share_ptr": make.poison(pairs, dtype=torch.float32),
            "chosen_ptr": make.zeros(pairs) - 1,
            "start_ptr": make.zeros(op.experts + 1) - 1,
            "pair_ptr": make.zeros(pairs) - 1,
            "num_tokens": t,
        }
        x, act = make.normal(t, op.hidden), make.poison(pairs, op.inter)
        up = make.normal(2 * op.experts, op.inter, op.hidden, scale=1 / math.sqrt(op.hidden))
        down = make.normal(op.experts, op.hidden, op.inter, scale=1 / math.sqrt(op.inter))
        biases = make.normal(2 * op.experts, op.inter), make.normal(op.experts, op.hidden)
        each = make.poison(pairs, op.hidden, dtype=TYPES[self.y_dtype])
        residual, out = make.normal(t, op.hidden), make.poison(t, op.hidden)
        own = [
            {},
            {},
            {"x_ptr": x, "w_ptr": up, "bias_ptr": biases[0], "y_ptr": act},
            {"x_ptr": act, "w_ptr": down, "bias_ptr": biases[1], "y_ptr": each},
            {"y_ptr": each, "residual_ptr": residual, "out_ptr": out},
        ]
        sizes = Sizes(tokens=t)
        steps = tuple(
            launch(source, sizes, values | more)
            for source, more in zip(self.sources(pdl), own, strict=True)
        )
        r = op.router
        share, chosen = route_reference(
            values["logits_ptr"],
            values["correction_ptr"] if self.correction else None,
            op.top_k,
            r["scoring"],
            r["groups"],
            r["group_top"],
            r["normalise"],
            r["scaling"],
        )
        want = experts_reference(
            x, chosen, share, up, biases[0] if op.bias else None, down,
            biases[1] if op.bias else None, op.activation, 1.702, 0.7,
        )  # fmt: skip
        want = want + residual.float() if op.residual else want
        count = t * op.top_k
        order = chosen.flatten().sort(stable=True).indices.int()
        return Prepared(
            steps,
            (
                Check("chosen", values["chosen_ptr"][:count], chosen.flatten().int()),
                Check("share", values["share_ptr"][:count], share.flatten(), 1e-5),
                Check("pairs", values["pair_ptr"][:count], order),
                Check("out", out, want.to(BF16), 1e-2),
            ),
        )
