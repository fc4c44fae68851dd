"""Mixture-of-experts kernels on CUDA: route, sort, grouped linear layers, weighted sum.

In: shapes and tiles. Out: a `KernelSource`. x and weights are bfloat16, shares fp32, indices int32;
no floating-point atomics, so a token's result is the same every time. `tile` is the rule for shapes
that were not measured.
"""

from typing import Any

from sitsc.codegen.cuda_instance import make, power_of_two
from sitsc.codegen.cuda_linear import ACTIVATIONS, TYPES
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError
from sitsc.core.ops.moe import CLAMPED, SCORINGS

_WIDEST = 128


def moe_route(
    *,
    experts: int,
    top_k: int,
    scoring: str = "softmax",
    groups: int = 1,
    group_top: int = 1,
    normalise: int = 1,
    scaling: float = 1.0,
    correction: bool = False,
    logits_dtype: str = "bf16",
    mine: int = 0,
    num_warps: int = 1,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """share fp32 and chosen int32 [tokens, top_k] of logits [tokens, experts].

    `mine`: a rank has so many experts, from first_ptr (int64 [1]) on. They are counted from 0; the
    others become number `mine` with a share of zero.
    """
    if scoring not in SCORINGS or not 0 < top_k <= experts or experts % groups:
        raise CompileError(f"no router {scoring!r} of {top_k} among {experts} in {groups} groups")
    names = [("logits_ptr", f"*{logits_dtype}")]
    names += [("correction_ptr", "*fp32")] if correction else []
    names += [("first_ptr", "*i64")] if mine else []
    names += [("share_ptr", "*fp32"), ("chosen_ptr", "*i32")]
    constants = {"E": experts, "TOP_K": top_k, "BLOCK_E": power_of_two(experts)}
    constants |= {"BLOCK_K": power_of_two(top_k)}
    if groups > 1:
        constants |= {"GROUPS": groups, "GROUP_TOP": group_top, "BLOCK_G": power_of_two(groups)}
    return make(
        "moe_route",
        tuple(names),
        constants,
        num_warps,
        pdl,
        early,
        scoring=scoring,
        groups=groups,
        group_size=experts // groups,
        normalise=normalise,
        scaling=scaling,
        correction=correction,
        mine=mine,
    )


def moe_sort(
    *,
    experts: int,
    top_k: int,
    block: int = 512,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """pair int32 [tokens · top_k] in the order of experts, start int32 [experts + 1]."""
    names = {"chosen_ptr": "*i32", "start_ptr": "*i32", "pair_ptr": "*i32", "num_tokens": "i32"}
    constants = {"E": experts, "TOP_K": top_k, "BLOCK": block}
    return make("moe_sort", tuple(names.items()), constants, num_warps, pdl, early)


def moe_linear(
    *,
    rows: int,
    columns: int,
    experts: int,
    top_k: int,
    tokens: int,
    block_t: int,
    block_n: int,
    block_k: int,
    stages: int,
    glu: bool = False,
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
    bias: bool = False,
    out_dtype: str = "bf16",
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """Grouped linear layers for up to `tokens` tokens: weights [experts (· 2), rows, columns].

    `glu` is gate and up with the activation between; raises CompileError for one that is not known.
    """
    if activation not in (*ACTIVATIONS, CLAMPED) or out_dtype not in TYPES:
        raise CompileError(f"expert kernels know no {activation!r} to {out_dtype!r}")
    names = [("x_ptr", "*bf16"), ("w_ptr", "*bf16"), ("bias_ptr", "*bf16"), ("start_ptr", "*i32")]
    names += [("pair_ptr", "*i32"), ("y_ptr", f"*{out_dtype}")]
    constants = {"N": rows, "K": columns, "E": experts, "TOP_K": top_k}
    constants |= {"TILES": most_tiles(experts, top_k, tokens, block_t)}
    constants |= {"BLOCK_E": power_of_two(experts), "BLOCK_N": block_n, "BLOCK_K": block_k}
    constants |= {"BLOCK_T": block_t, "STAGES": stages}
    return make(
        "moe_linear",
        tuple(pair for pair in names if bias or pair[0] != "bias_ptr"),
        constants,
        num_warps,
        pdl,
        early,
        stages,
        glu=glu,
        activation=activation,
        alpha=alpha,
        limit=limit,
        bias=bias,
        ragged=bool(columns % block_k),
    )


def moe_sum(
    *,
    columns: int,
    top_k: int,
    residual: bool = False,
    some: bool = False,
    y_dtype: str = "fp32",
    out_dtype: str = "bf16",
    block: int = 1024,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """out [tokens, columns] from y [tokens, top_k, columns] and share [tokens, top_k].

    `some`: rows of y whose share is zero may hold anything.
    """
    names = [("y_ptr", f"*{y_dtype}"), ("share_ptr", "*fp32"), ("residual_ptr", f"*{out_dtype}")]
    names += [("out_ptr", f"*{out_dtype}")]
    return make(
        "moe_sum",
        tuple(pair for pair in names if residual or pair[0] != "residual_ptr"),
        {"H": columns, "TOP_K": top_k, "BLOCK": min(block, power_of_two(columns))},
        num_warps,
        pdl,
        early,
        residual=residual,
        some=some,
    )


def most_tiles(experts: int, top_k: int, tokens: int, block_t: int) -> int:
    """The most tiles of tokens that there can be over all experts."""
    pairs = tokens * top_k
    return pairs // block_t + min(experts, pairs)


def tile(shape: dict[str, Any], sms: int, shared_bytes: int) -> dict[str, int]:
    """The rule: tokens of a tile by what an expert gets on average, rows so that all have work."""
    pairs = shape["tokens"] * shape["top_k"]
    active = min(shape["experts"], pairs)
    sides = 2 if shape.get("glu") else 1
    block_t = min(_WIDEST, max(16, power_of_two(-(-pairs // active))))
    block_n = 64 if sides == 2 or block_t < _WIDEST else _WIDEST
    tiles = pairs // block_t + active if block_t > 16 else active
    while block_n > 16 and -(-shape["rows"] // block_n) * tiles < sms:
        block_n //= 2
    block_k = 128 if block_t <= 32 and shape["columns"] >= 512 else 64
    stage = 2 * block_k * (sides * block_n + block_t)
    stages = max(2, min(4, (shared_bytes - 8192) // stage))
    warps = 8 if block_t * block_n * sides >= _WIDEST * _WIDEST else 4
    given = {"block_t": block_t, "block_n": block_n, "block_k": block_k}
    return given | {"stages": stages, "num_warps": warps}
