"""Cost of one operator at given sizes: bytes moved, floating-point operations, predicted time.

Roofline: the larger of bytes over read bandwidth and operations over the ceiling of the dtype,
plus the fixed cost of a launch. Sizes of the step come by name ("tokens", "context").
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from sitsc.core.plan import Target
from sitsc.passes.cost_formulas import Cost, active_experts, attention_cost, experts_share
from sitsc.passes.fxutil import arguments, is_op, is_view, tensor, weight_of

__all__ = [
    "Cost",
    "Sizes",
    "active_experts",
    "attention_cost",
    "cost_of",
    "experts_share",
    "predict_us",
    "reached",
]


class Sizes:
    """Evaluates symbolic sizes of a graph for one step."""

    def __init__(self, symbols: Mapping[str, str], values: Mapping[str, int]) -> None:
        self.values = dict(values)
        self.known = {symbol: values[name] for symbol, name in symbols.items() if name in values}

    def of(self, size: Any) -> int:
        """One size as a number."""
        if isinstance(size, int):
            return size
        expression = size.node.expr if isinstance(size, torch.SymInt) else size
        return int(expression.subs({s: self.known[str(s)] for s in expression.free_symbols}))

    def elements(self, node: fx.Node) -> int:
        """Elements of a node's tensor."""
        return math.prod(self.of(size) for size in tensor(node).shape)

    def nbytes(self, node: Any) -> int:
        """Bytes of a node's tensor, 0 for anything else."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            return 0
        spec = weight_of(node)
        return spec.nbytes if spec else self.elements(node) * value.dtype.itemsize


def cost_of(node: fx.Node, sizes: Sizes) -> Cost:
    """The cost of one call."""
    if is_op(node, "fused_linear"):
        return _linear(node, sizes)
    if is_op(node, "paged_attention"):
        return _attention(node, sizes)
    if is_op(node, "moe"):
        return _experts(node, sizes)
    out = sizes.nbytes(node)
    if is_op(node, "packed_embedding", "embedding"):
        return Cost(2 * out, 0, "float32")
    if not isinstance(node.meta.get("val"), torch.Tensor) or is_view(node):
        return Cost(0, 0, "float32")
    return Cost(
        out + sum(sizes.nbytes(n) for n in node.all_input_nodes), sizes.elements(node), "float32"
    )


def _linear(node: fx.Node, sizes: Sizes) -> Cost:
    args = arguments(node)
    spec = weight_of(args["weight"])
    x = tensor(args["x"])
    rows = sizes.elements(args["x"]) // sizes.of(x.shape[-1])
    outputs = args["out_features"] * (2 if args["epilogue"] == "glu" else 1)
    moved = sum(sizes.nbytes(n) for n in node.all_input_nodes) + sizes.nbytes(node)
    dtype = spec.dtype if spec else "float32"
    return Cost(moved, 2 * rows * outputs * sizes.of(x.shape[-1]), dtype)


def _experts(node: fx.Node, sizes: Sizes) -> Cost:
    """The weights of the chosen experts are read once; a token computes `top_k` of them."""
    args = arguments(node)
    spec = weight_of(args["gate_up"])
    experts, hidden = sizes.of(tensor(args["logits"]).shape[-1]), sizes.of(tensor(node).shape[-1])
    rows = sizes.elements(node) // hidden
    share = experts_share(experts, args["top_k"], rows)
    weights = [n for n in node.all_input_nodes if weight_of(n) is not None]
    moved = share * sum(sizes.nbytes(n) for n in weights) + sizes.nbytes(node)
    moved += sum(sizes.nbytes(n) for n in node.all_input_nodes if n not in weights)
    dtype = spec.dtype if spec else "float32"
    return Cost(int(moved), 6 * rows * args["top_k"] * args["intermediate"] * hidden, dtype)


def _attention(node: fx.Node, sizes: Sizes) -> Cost:
    """Every new token reads the keys and values of its sequence: context + tokens a sequence."""
    args = arguments(node)
    q, k, pool = tensor(args["q"]), tensor(args["k"]), tensor(args["kv"])
    values = sizes.values
    kv_bytes, flops = attention_cost(
        *(values[name] for name in ("tokens", "sequences", "context")),
        heads=sizes.of(q.shape[1]),
        kv_heads=sizes.of(k.shape[1]),
        dim=sizes.of(q.shape[2]),
        itemsize=pool.dtype.itemsize,
        window=args["window"],
    )
    moved = (
        kv_bytes + sum(sizes.nbytes(args[name]) for name in ("q", "k", "v")) + sizes.nbytes(node)
    )
    return Cost(int(moved), flops, "float32")


def predict_us(cost: Cost, target: Target) -> float:
    """Predicted microseconds of a cost on a target; nothing for views.

    A calibrated target says what shares of its ceilings kernels reach.
    """
    if cost.bytes == 0 and cost.flops == 0:
        return 0.0
    read = target.ceilings["read_bytes_per_s"].value * reached(target, "read_share")
    peak = target.ceilings[f"{cost.dtype}_flops"].value * reached(target, "matmul_share")
    seconds = max(cost.bytes / read, cost.flops / peak)
    return 1e6 * (seconds + target.ceilings["launch_seconds"].value)


def reached(target: Target, share: str) -> float:
    """What kernels reach of a ceiling: all of it on a target that nobody calibrated."""
    return target.ceilings[share].value if share in target.ceilings else 1.0
