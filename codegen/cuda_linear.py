"""The linear family on CUDA: kernel instances of y = epilogue(W f(x)) from shape and tile.

In: rows and columns of W, what stands before and after, a tile. Out: a `KernelSource`. W [N, K]
and x [tokens, K] are bfloat16, row-major; before a norm x may be fp32; the residual [tokens, N] has
the type of y; sums are fp32. With `squares`, x is the norm's input times its weight, and as many
sums of squares a row say 1 / rms. For epilogue "glu" W holds 2 N rows, gates first; "parts" leaves
the sums of each share of the columns, fp32 [split, tokens, N], to the next kernel. With `scaled`, y
also goes times the weight of the norm that reads it, with as many sums of its squares, to the next.
"""

from dataclasses import dataclass
from typing import Any

from sitsc.codegen.cuda_instance import make, power_of_two
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError
from sitsc.core.tiles import WIDE_COLUMNS, wide_supported

EPILOGUES = ("store", "residual", "glu", "parts")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu_erf", "relu")
TYPES = ("bf16", "fp32")
WIDE_TOKENS = (9, 256)
_WIDE_BLOCKS = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Linear:
    """What is computed: out_features N, in_features K, the parts around the product.

    `eps` and `offset` belong to the norm before, `next_offset` to the one after it. `x_dtype` and
    `out_dtype` are "bf16" or "fp32": logits, or a residual stream that is not rounded between
    layers; x is fp32 only before a norm. `scaled` is how many programs there are, or 0.
    """

    rows: int
    columns: int
    norm: bool = False
    eps: float = 0.0
    offset: float = 0.0
    epilogue: str = "store"
    activation: str = "silu"
    bias: bool = False
    out_dtype: str = "bf16"
    x_dtype: str = "bf16"
    squares: int = 0
    scaled: int = 0
    next_offset: float = 0.0

    def check(self) -> None:
        """Raises CompileError for an epilogue, activation or type that no template has."""
        given = (self.epilogue, self.activation, self.out_dtype, self.x_dtype)
        known = (EPILOGUES, ACTIVATIONS, TYPES, TYPES if self.norm else ("bf16",))
        for value, names in zip(given, known, strict=True):
            if value not in names:
                hint = f"one of: {', '.join(names)}"
                raise CompileError(f"linear kernels know no {value!r}", hint=hint)
        if self.epilogue == "parts" and (self.norm or self.bias):
            raise CompileError("sums in parts have no norm and no bias", hint="take them apart")
        if self.squares and self.norm:
            raise CompileError("a norm is spread over programs or inside", hint="apart from this")
        if self.scaled and self.epilogue != "residual":
            raise CompileError("only residual sums are left for a norm", hint="scaled 0")

    @property
    def sides(self) -> int:
        """Rows of W for each row of y."""
        return 2 if self.epilogue == "glu" else 1


def arguments(op: Linear, split: int) -> tuple[tuple[str, str], ...]:
    """Names and types of the run-time arguments that all kernels of the family begin with."""
    names = [
        ("x_ptr", f"*{op.x_dtype}"),
        ("norm_ptr", "*bf16"),
        ("squares_ptr", "*fp32"),
        ("w_ptr", "*bf16"),
        ("bias_ptr", "*bf16"),
    ]
    names += [("residual_ptr", f"*{op.out_dtype}"), ("y_ptr", f"*{op.out_dtype}")]
    names += [("parts_ptr", "*fp32"), ("next_norm_ptr", "*bf16"), ("scaled_ptr", "*bf16")]
    names += [("scaled_squares_ptr", "*fp32"), ("partial_ptr", "*fp32"), ("counter_ptr", "*i32")]
    absent = set() if op.norm else {"norm_ptr"}
    absent |= set() if op.squares else {"squares_ptr"}
    absent |= set() if op.bias else {"bias_ptr"}
    absent |= set() if op.epilogue == "residual" else {"residual_ptr"}
    absent |= {"y_ptr"} if op.epilogue == "parts" else {"parts_ptr"}
    absent |= set() if op.scaled else {"next_norm_ptr", "scaled_ptr", "scaled_squares_ptr"}
    absent |= set() if split > 1 and op.epilogue != "parts" else {"partial_ptr", "counter_ptr"}
    return tuple(pair for pair in names if pair[0] not in absent)


def gemv(
    op: Linear,
    *,
    tokens: int,
    block_n: int,
    block_k: int,
    depth: int = 1,
    stages: int = 0,
    split: int = 1,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """1-4 tokens, x in registers; `stages` > 0 takes the weights through shared memory.

    Runs on any grid that `split` divides. Without a split a program holds all columns, in blocks
    of `block_k`. Raises CompileError for a norm with split columns.
    """
    if split > 1 and (op.norm or op.scaled):
        raise CompileError("a row kernel with a norm needs all columns", hint="split 1")
    _no_parts(op)
    blocks = -(-op.columns // block_k)
    parts = -(-blocks // split)
    constants = _shape(op) | {"GROUPS": -(-op.rows // block_n), "SPLIT": split}
    constants |= {"BLOCK_N": block_n, "BLOCK_K": block_k} | ({"STAGES": stages} if stages else {})
    return make(
        "gemv_stream" if stages else "gemv",
        arguments(op, split),
        constants,
        num_warps,
        pdl,
        early,
        max(stages, 1),
        tokens=tokens,
        parts=parts,
        split=split,
        ragged=parts * split * block_k != op.columns,
        **({} if stages else {"depth": depth}),
        **_parameters(op),
    )


def gemv_walk(
    op: Linear,
    *,
    tokens: int,
    block_n: int,
    block_k: int,
    depth: int = 1,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """1-4 tokens; a program owns `block_n` rows and walks all columns."""
    _no_parts(op)
    constants = _shape(op) | {"BLOCK_N": block_n, "BLOCK_K": block_k}
    more = _parameters(op) | {"tokens": tokens, "depth": depth}
    return make("gemv_walk", arguments(op, 1), constants, num_warps, pdl, early, **more)


def skinny(
    op: Linear,
    *,
    block_t: int,
    block_n: int,
    block_k: int,
    stages: int,
    split: int = 1,
    ahead: bool = False,
    prefetch_bytes: int = 0,
    fold: int = 1,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """Up to `block_t` (16, 32, 64 or 128) tokens on tensor cores.

    `ahead` requests weights before the dependency, otherwise `prefetch_bytes` of each row go to
    L2 before it (sm_90 and up). With `fold`, a power of two, a program multiplies as many shares of
    its columns side by side, as if they were rows, and adds their sums at the end: fewer rows a
    program, and tensor cores wait less for their own sums. Raises CompileError for `scaled` rows of
    split columns, and for a `fold` that does not divide the columns or has a norm inside.
    """
    _may_fold(op, fold, split * block_k, prefetch_bytes)
    if split > 1 and op.scaled:
        raise CompileError("rows are scaled for a norm when they are whole", hint="split 1")
    span = -(-op.columns // (split * block_k)) * block_k
    constants = _shape(op) | {"SPAN": span, "SPLIT": split, "STAGES": stages}
    constants |= {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_T": block_t}
    constants |= {"FOLD": fold} if fold > 1 else {}
    more = _parameters(op) | {"fold": fold} | {"split": split, "ragged": span * split != op.columns}
    if not ahead:
        more |= {"prefetch": min(prefetch_bytes, span * 2) // 16 * 16, "block_n": block_n}
    names = (*arguments(op, split), ("num_tokens", "i32"))
    name = "skinny_ahead" if ahead else "skinny"
    return make(name, names, constants, num_warps, pdl, early, stages, **more)


def wide(
    op: Linear,
    *,
    tokens: int,
    block_t: int,
    block_n: int,
    stages: int,
    split: int = 1,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """9-256 tokens on sm_90: `block_t` (64, 128 or 256) of them, `block_n` rows a program.

    W comes through the copy engine, 64 columns at a time; a glu has `block_n` rows of each half.
    Raises CompileError for a norm, for columns that are no whole 16 bytes, and for split columns
    whose sums do not stay in parts.
    """
    if op.norm or op.scaled or not wide_supported(op.columns):
        columns = f"{op.columns} columns"
        what = "a norm inside" if op.norm else "rows for a norm" if op.scaled else columns
        hint = f"a norm of its own, columns that are a multiple of {WIDE_COLUMNS}"
        raise CompileError(f"no wide kernel with {what}", hint=hint)
    if block_t not in _WIDE_BLOCKS:
        raise CompileError(f"no wide kernel of {block_t} tokens a program", hint="64, 128 or 256")
    if split > 1 and op.epilogue != "parts":
        raise CompileError("a wide kernel leaves split columns in parts", hint="split 1, or skinny")
    span = -(-op.columns // (split * 64)) * 64
    constants = _shape(op) | {"SPAN": span, "SPLIT": split, "BLOCK_N": block_n}
    constants |= {"BLOCK_T": block_t, "TILES": -(-tokens // block_t)}
    constants |= {"STAGES": min(stages, span // 64 + 1)}
    maps = {"x_ptr": ("x_map", block_t), "w_ptr": ("w_map", block_n)}
    kinds = [
        (maps[name][0], f"tensordesc<bf16[{maps[name][1]},64]>") if name in maps else (name, kind)
        for name, kind in arguments(op, split)
    ]
    names = (*kinds, ("num_tokens", "i32"))
    return make("wide", names, constants, block_t // 16, pdl, early, 1, **_parameters(op))


def scaling_programs(rows: int, tile: dict[str, int]) -> int:
    """How many programs a kernel without split columns has, which each leave a sum of squares."""
    groups = -(-rows // tile["block_n"])
    return min(tile.get("programs") or groups, groups)


def workspace(op: Linear, source: KernelSource, tokens: int) -> tuple[int, int]:
    """(fp32 partial sums, int32 counters) that the kernel needs; (0, 0) without a split.

    Kernels of one stream share them. The counters must be zero before the first launch.
    """
    if "partial_ptr" not in dict(source.arguments):
        return 0, 0
    size = {name: int(value) for name, value in source.constants.items()}
    if "BLOCK_T" not in size:
        return size["SPLIT"] * op.sides * tokens * op.rows, size["GROUPS"]
    tiles = -(-op.rows // size["BLOCK_N"])
    rows = op.sides * size["BLOCK_N"] + 1
    return tiles * size["SPLIT"] * rows * size["BLOCK_T"], tiles


def _may_fold(op: Linear, fold: int, columns: int, prefetch: int) -> None:
    """Raises CompileError where columns cannot be multiplied side by side."""
    whole = op.columns % (fold * columns) == 0 and not prefetch
    if fold > 1 and (op.norm or not whole or fold & (fold - 1)):
        hint = "no norm inside, no prefetch, shares of whole blocks"
        raise CompileError(f"columns cannot be folded {fold} times", hint=hint)


def _no_parts(op: Linear) -> None:
    if op.epilogue == "parts":
        raise CompileError("kernels for 1-4 tokens leave no sums in parts", hint="take skinny")


def _shape(op: Linear) -> dict[str, int]:
    op.check()
    return {"N": op.rows, "K": op.columns}


def _parameters(op: Linear) -> dict[str, Any]:
    """What all templates of the family are rendered with."""
    shown = {"norm": op.norm, "eps": op.eps, "offset": op.offset, "bias": op.bias}
    shown |= {"squares": op.squares, "squares_block": power_of_two(op.squares)}
    shown |= {"scaled": op.scaled, "next_offset": op.next_offset}
    return shown | {"epilogue": op.epilogue, "activation": op.activation}
