"""Collectives of several ranks as CUDA kernels: they write to each other's arenas.

In: shapes and the number of ranks. Out: a `KernelSource`. The arenas of the ranks of a stage are
alike and mapped by all of them; every rank launches the same kernels in the same order. A kernel
looks for what it waits for `POLLS` times at most; then it notes an error and goes on.
"""

import math

from sitsc.codegen.cuda_instance import make, power_of_two
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError

POLLS = 100_000_000  # 15 s and more: the ranks' watch ends the job before
_VECTOR_BYTES = 16
_WHOLE = 8  # elements, of which rows of sums are a multiple: vectors of either type
_MOST_VECTORS = 256  # of a program
_BYTES = {"fp32": 4, "bf16": 2}
_UP = 1 << 30
_FEW, _MANY = 1024, 4096  # vectors of all ranks in a block: up to there one or two to a thread
_REGISTERS = 65536  # of a multiprocessor, on all that there is code for
_MOST_REGISTERS = 255
_MOST_THREADS = 1024
_WARP = 32  # threads; with fewer vectors two of them would read a slot
_LEAD = 2  # rows of a program on their way while it adds those before them
_COMMON = {"peers_ptr": "*i64", "calls_ptr": "*i64"}


def all_reduce(
    *,
    ranks: int,
    columns: int,
    payload: str = "fp32",
    parts: int = 1,
    parts_dtype: str = "fp32",
    residual: bool = True,
    x_dtype: str = "fp32",
    norm: bool = True,
    eps: float = 0.0,
    offset: float = 0.0,
    weight: bool = True,
    blocks: int = 1,
    many: bool = False,
    num_warps: int = 0,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """sum = x + the sums of all ranks [rows, columns], and bfloat16 y = its RMS norm.

    A rank's sum is parts_ptr [parts, rows, columns]; it travels as `payload`. `blocks` programs
    share a row, whose y then lacks 1 / rms. `many`: few programs take row after row. Rows that are
    no whole vectors are taken several at once, so that they are; what follows the last row is
    written too. Raises CompileError for those with a norm or several parts.
    """
    width = _VECTOR_BYTES // _BYTES[payload]
    group = _WHOLE // math.gcd(columns, _WHOLE)
    if group > 1 and (norm or parts > 1):
        what = f"rows of {columns} elements are summed without a norm and from one part"
        raise CompileError(what, hint="a multiple of 8")
    columns *= group
    if (parts_dtype, payload) == ("bf16", "fp32"):
        raise CompileError("sums of bfloat16 travel as bfloat16", hint="payload bf16")
    vectors = columns // width
    block = max(_WARP, power_of_two(-(-vectors // blocks)))
    each = 1 if ranks * block <= _FEW else 2 if ranks * block <= _MANY else 4
    num_warps = num_warps or min(32, max(1, block // (each * _WARP)))
    names = {"x_ptr": f"*{x_dtype}"} if residual else {}
    names |= {"parts_ptr": f"*{parts_dtype}", "sum_ptr": f"*{x_dtype}"}
    names |= {"norm_ptr": "*bf16"} if norm and weight else {}
    names |= {"y_ptr": "*bf16"} if norm else {}
    names |= {"squares_ptr": "*fp32"} if norm and blocks > 1 else {}
    return make(
        "all_reduce",
        tuple((names | {"slots_ptr": "*i32"} | _COMMON | {"num_rows": "i32"}).items()),
        {"H": columns, "BLOCK": block, "BLOCKS": blocks},
        num_warps,
        pdl,
        early,
        registers=min(_MOST_REGISTERS, _REGISTERS // (_WARP * num_warps)),
        ranks=ranks,
        payload=payload,
        parts=parts,
        parts_dtype=parts_dtype,
        residual=residual,
        x_dtype=x_dtype,
        norm=norm,
        weight=norm and weight,
        eps=eps,
        offset=offset,
        blocks=blocks,
        many=many,
        lead=_LEAD,
        group=group,
        ragged=block * blocks != vectors,
        bytes_of=_BYTES,
        polls=POLLS,
    )


def all_gather(
    *, ranks: int, inner_bytes: int, num_warps: int = 8, pdl: bool = True, early: bool = True
) -> KernelSource:
    """y [rows, ranks, inner] = x [rows, inner] of every rank. Raises CompileError for odd sizes."""
    names = {"x_ptr": "*i8", "y_ptr": "*i8", "pads_ptr": "*i32"} | _COMMON
    if inner_bytes % _VECTOR_BYTES:
        raise CompileError(f"{inner_bytes} bytes cannot be gathered", hint="a multiple of 16")
    return make(
        "all_gather",
        tuple((names | {"num_rows": "i32"}).items()),
        _chunks(inner_bytes),
        num_warps,
        pdl,
        early,
        ranks=ranks,
        seats=power_of_two(ranks),
        polls=POLLS,
    )


def share_ids(
    *,
    ranks: int,
    max_sequences: int = 256,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """sampled_ids of rank 0 on all ranks; ids and error numbers are below 2**30 in size."""
    names = {"ids_ptr": "*i64", "slots_ptr": "*i32"} | _COMMON | {"num_sequences": "i32"}
    block = _one_to_a_thread(max_sequences)
    return make(
        "share_ids",
        tuple(names.items()),
        {"BLOCK": block},
        block // _WARP,
        pdl,
        early,
        ranks=ranks,
        up=_UP,
        polls=POLLS,
    )


def send_ids(
    *,
    slots: int,
    rows: int,
    max_sequences: int = 256,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """sampled_ids of the last stage to the mail of the first, which holds `slots` steps of `rows`.

    Ids and error numbers are below 2**30 in size.
    """
    names = {"ids_ptr": "*i64", "links_ptr": "*i64", "calls_ptr": "*i64", "num_sequences": "i32"}
    block = _one_to_a_thread(max_sequences)
    constants = {"BLOCK": block, "SLOTS": slots, "ROWS": rows}
    return make("send_ids", tuple(names.items()), constants, block // _WARP, pdl, early, up=_UP)


def place_sent(
    *, slots: int, rows: int, max_sequences: int = 256, num_warps: int = 8, pdl: bool = True
) -> KernelSource:
    """token_ids out of that mail. A source is a row plus `rows` for every step since.

    Waits until the step has been sampled.
    """
    names = {"mail_ptr": "*i32", "token_sources_ptr": "*i32", "token_places_ptr": "*i32"}
    names |= {"token_ids_ptr": "*i64", "calls_ptr": "*i64", "num_sequences": "i32"}
    constants = {"BLOCK": power_of_two(max_sequences), "SLOTS": slots, "ROWS": rows}
    return make("place_sent", tuple(names.items()), constants, num_warps, pdl, up=_UP, polls=POLLS)


def send(
    *, inner_bytes: int, num_warps: int = 8, pdl: bool = True, early: bool = True
) -> KernelSource:
    """x [rows, inner] to the mail of the next stage, in groups of rows that are whole vectors."""
    names = {"x_ptr": "*i8", "acks_ptr": "*i32"}
    return _crossing("send", names, inner_bytes, num_warps, pdl, early)


def receive(
    *, inner_bytes: int, num_warps: int = 8, pdl: bool = True, early: bool = True
) -> KernelSource:
    """y [rows, inner] out of the mail of this stage."""
    names = {"mail_ptr": "*i8", "y_ptr": "*i8", "flags_ptr": "*i32"}
    return _crossing("receive", names, inner_bytes, num_warps, pdl, early)


def _crossing(
    name: str, names: dict[str, str], inner_bytes: int, num_warps: int, pdl: bool, early: bool
) -> KernelSource:
    names |= {"links_ptr": "*i64", "calls_ptr": "*i64", "num_rows": "i32"}
    group = _VECTOR_BYTES // math.gcd(inner_bytes, _VECTOR_BYTES)
    return make(
        name,
        tuple(names.items()),
        _chunks(inner_bytes * group),
        num_warps,
        pdl,
        early,
        group=group,
        polls=POLLS,
    )


def _one_to_a_thread(count: int) -> int:
    """Of `count` elements how many are taken at once; a thread has one."""
    return min(_MOST_THREADS, max(_WARP, power_of_two(count)))


def _chunks(inner_bytes: int) -> dict[str, int]:
    """Rows of so many bytes in vectors, several to a program."""
    block = min(_MOST_VECTORS, power_of_two(inner_bytes // _VECTOR_BYTES))
    chunks = -(-inner_bytes // (_VECTOR_BYTES * block))
    return {"INNER": inner_bytes, "BLOCK": block, "CHUNKS": chunks}
