"""Row-wise kernels on CUDA: norm, gathers, rope table, glu, the step's next inputs.

In: shapes and a tile. Out: a `KernelSource`. Rows are bfloat16 and contiguous, logits fp32; ids and
positions int64, lengths int32. Each is small: what counts is that it starts early.
"""

from sitsc.codegen.cuda_instance import make, power_of_two
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError

_LONG_ROW = 4096
_WARP_COLUMNS = 512


def rms_norm(
    *,
    columns: int,
    eps: float,
    offset: float = 0.0,
    weight: bool = True,
    parts: int = 0,
    parts_dtype: str = "fp32",
    blocks: int = 1,
    x_dtype: str = "bf16",
    num_warps: int = 0,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """x [rows, columns] to bfloat16 y; with `parts`, x plus parts_ptr [parts, rows, columns].

    The sum is kept in sum_ptr, which may be x_ptr; x and sum have the type `x_dtype`. With parts,
    long rows take 16 warps unless `num_warps` says otherwise. With `blocks` > 1, a power of two, as
    many programs share a row: y lacks 1 / rms, squares_ptr [rows, blocks] gets sums of squares.
    """
    block, many = power_of_two(-(-columns // blocks)), 16 if parts and columns >= _LONG_ROW else 8
    num_warps = num_warps or (many if blocks == 1 else max(1, block // _WARP_COLUMNS))
    kinds = {"x_ptr": f"*{x_dtype}", "parts_ptr": f"*{parts_dtype}", "sum_ptr": f"*{x_dtype}"}
    kinds |= {"norm_ptr": "*bf16", "y_ptr": "*bf16", "squares_ptr": "*fp32"}
    absent = set() if parts else {"parts_ptr", "sum_ptr"}
    absent |= set() if blocks > 1 else {"squares_ptr"}
    absent |= set() if weight else {"norm_ptr"}
    return make(
        "rms_norm",
        tuple((name, kind) for name, kind in kinds.items() if name not in absent),
        {"H": columns, "BLOCK": block, "BLOCKS": blocks},
        num_warps,
        pdl,
        early,
        eps=eps,
        offset=offset,
        weight=weight,
        parts=parts,
        blocks=blocks,
    )


def gather(
    *,
    columns: int,
    scale: float = 1.0,
    out_dtype: str = "bf16",
    table_dtype: str = "bf16",
    clear: int = 0,
    parts_dtype: str = "fp32",
    scaled: int = 0,
    offset: float = 0.0,
    block: int = 1024,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """y [rows, columns] = table[ids]: an embedding, times `scale`, or the rows that need logits.

    `clear` sums in parts_ptr [clear, rows, columns] become zero: the first layer adds what each
    later one finds there. With `scaled`, y also goes times offset + norm_ptr to scaled_ptr, and so
    many sums of squares a row to squares_ptr, as a residual layer leaves them.
    """
    kinds = {"table_ptr": f"*{table_dtype}", "ids_ptr": "*i64", "y_ptr": f"*{out_dtype}"}
    kinds |= {"parts_ptr": f"*{parts_dtype}"} if clear else {}
    block = min(block, power_of_two(columns))
    constants = {"H": columns, "BLOCK": block}
    if scaled:
        kinds |= {"norm_ptr": "*bf16", "scaled_ptr": "*bf16", "squares_ptr": "*fp32"}
        constants["BLOCK"] = max(block, power_of_two(-(-columns // scaled)))
        constants["ENTRIES"] = power_of_two(scaled)
    return make(
        "gather",
        tuple(kinds.items()),
        constants,
        num_warps,
        pdl,
        early,
        scale=scale,
        clear=clear,
        scaled=scaled,
        offset=offset,
    )


def rope_table(
    *,
    rotary_dim: int,
    style: str = "half",
    scale: float = 1.0,
    out_dtype: str = "bf16",
    block_t: int = 4,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """cos, sin [tokens, rotary_dim] ("bf16" or "fp32") from position_ids and inv_freq fp32."""
    if style not in ("half", "interleaved"):
        raise CompileError(f"no rope table of style {style!r}", hint="half or interleaved")
    kinds = {"position_ids_ptr": "*i64", "inv_freq_ptr": "*fp32"}
    kinds |= {"cos_ptr": f"*{out_dtype}", "sin_ptr": f"*{out_dtype}", "num_tokens": "i32"}
    return make(
        "rope_table",
        tuple(kinds.items()),
        {"R": rotary_dim, "BLOCK_T": block_t, "BLOCK_R": power_of_two(rotary_dim)},
        num_warps,
        pdl,
        early,
        style=style,
        scale=scale,
    )


def glu(
    *,
    columns: int,
    activation: str = "silu",
    block: int = 1024,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """y [tokens, columns] from x [tokens, 2 columns] = [gate; up]."""
    constants = {"H": columns, "BLOCK": min(block, power_of_two(columns))}
    names = (("x_ptr", "*bf16"), ("y_ptr", "*bf16"))
    return make("glu", names, constants, num_warps, pdl, early, activation=activation)


def advance(
    *, max_sequences: int = 256, num_warps: int = 4, pdl: bool = True, early: bool = True
) -> KernelSource:
    """The next step's token_ids, position_ids and context_lens from the sampled ids."""
    kinds = {"ids_ptr": "*i64", "token_ids_ptr": "*i64", "position_ids_ptr": "*i64"}
    kinds |= {"context_lens_ptr": "*i32", "num_sequences": "i32"}
    constants = {"BLOCK": power_of_two(max_sequences)}
    return make("advance", tuple(kinds.items()), constants, num_warps, pdl, early)


def place(*, max_sequences: int = 256, num_warps: int = 4, pdl: bool = True) -> KernelSource:
    """token_ids[token_places[i]] = ids[token_sources[i]], what an earlier step sampled."""
    kinds = {"ids_ptr": "*i64", "token_sources_ptr": "*i32", "token_places_ptr": "*i32"}
    kinds |= {"token_ids_ptr": "*i64", "num_sequences": "i32"}
    constants = {"BLOCK": power_of_two(max_sequences)}
    return make("place", tuple(kinds.items()), constants, num_warps, pdl)
