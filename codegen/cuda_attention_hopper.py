"""Paged prefill attention for sm_90: instances of the Gluon template, and which heads it takes.

In: the heads of a layer and a tile. Out: a `KernelSource`. Its tensor descriptors are dense: q_map
is [tokens, row / head_dim, head_dim] over the packed rows (heads of q first), kv_map
[pages * 2 * kv_heads * page_tokens, head_dim] over the pages of the layer.
"""

import math

from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_instance import make, power_of_two
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError

ROWS = 128
MOST_SEQUENCES = 256  # one warp finds tiles among them in its registers
_HEAD_DIMS, _CHUNK = (64, 128, 256), 64
_PAGES = (16, 32, 64)


def supported(op: Heads, sm: int) -> bool:
    """Whether attention_prefill_hopper computes these heads on this architecture."""
    if sm != 90 or op.head_dim not in _HEAD_DIMS or op.page_tokens not in _PAGES:
        return False
    # Sums of 256 dimensions leave no registers for a window, sinks and rows shared by 2 or 4 heads.
    full = op.head_dim > 128 and op.window and op.sinks and packed_heads(op) in (2, 4)
    return op.scale > 0 and not full


def tile(op: Heads) -> dict[str, int]:
    """The tile measured to be best on an H200; head_dim 256 leaves no room for more."""
    wide = op.head_dim > 128
    return {"block_n": 64 if wide else 128, "stages": 2, "queries": 1 if wide else 2}


def packed_heads(op: Heads) -> int:
    """Query heads of one kv head in a tile: the largest power of two that divides their number."""
    return math.gcd(op.group, ROWS)


def attention_prefill_hopper(
    op: Heads,
    *,
    block_n: int,
    stages: int,
    queries: int,
    q_row: int = 0,
    max_sequences: int = 256,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """A ragged batch whose k and v are in the pages; q rotated, `q_row` elements a row.

    Any mix of prefill chunks and decoding sequences. Out [tokens, heads * head_dim]. counter_ptr is
    one int32, zero before and after. Raises CompileError for heads that it does not compute.
    """
    op.check()
    if not supported(op, 90) or block_n % op.page_tokens:
        what = f"head_dim {op.head_dim}, pages of {op.page_tokens}, block_n {block_n}"
        raise CompileError(f"no Hopper kernel of {what}", hint="take attention_prefill")
    pack, row = packed_heads(op), q_row or op.row
    box = f"{ROWS // pack},{pack},{_CHUNK}"
    kinds = {"q_map": f"tensordesc<bf16[{box}]>"} | ({"sinks_ptr": "*fp32"} if op.sinks else {})
    kinds |= {"kv_map": f"tensordesc<bf16[{op.page_tokens},{_CHUNK}]>", "block_table_ptr": "*i32"}
    kinds |= {"query_start_ptr": "*i32", "context_lens_ptr": "*i32", "out_ptr": "*bf16"}
    kinds |= {"counter_ptr": "*i32", "num_sequences": "i32", "table_width": "i32"}
    constants = {"HQ": op.heads, "HKV": op.kv_heads, "D": op.head_dim, "PAGE": op.page_tokens}
    constants |= {"TOKENS": ROWS // pack, "PACK": pack, "BLOCK_N": block_n}
    constants |= {"BLOCK_SEQ": max(32, power_of_two(max_sequences)), "STAGES": stages}
    constants |= {"QUERIES": queries}
    if row % op.head_dim:
        raise CompileError(f"rows of {row} elements are not whole heads of {op.head_dim}")
    return make(
        "attention_prefill_hopper",
        tuple(kinds.items()),
        constants,
        4,
        pdl,
        early,
        1,
        page=op.page_tokens,
        head_dim=op.head_dim,
        block_n=block_n,
        block_seq=constants["BLOCK_SEQ"],
        wide=op.head_dim <= 128,  # registers for it
        **op.parameters(),
    )
