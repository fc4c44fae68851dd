"""Paged attention on CUDA: kernel instances from the shape of a layer's heads and a tile.

In: heads, rotation, window, cap, sinks, a tile. Out: a `KernelSource`. q, k and v of a token are
slices of one packed bfloat16 row; pages of a layer are [pages, 2, kv_heads, page_tokens, head_dim],
keys before values, both token-major; lengths and block tables are int32, read on the device.
"""

import math
from dataclasses import dataclass

from sitsc.codegen.cuda_instance import make, power_of_two
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError

LOG2_E = math.log2(math.e)
ROPE_STYLES = ("none", "half", "interleaved")


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one layer, and where q, k and v stand in a row of `row` elements.

    `rotary_dim` dimensions are rotated; `window` and `softcap` of 0 mean none. cos and sin rows
    have the type `angle_dtype`, "bf16" or "fp32". With `row_parts`, a row of a decode step is the
    sum of so many fp32 rows [row_parts, sequences, row], otherwise it is bfloat16.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    scale: float
    rope: str = "half"
    rotary_dim: int = 0
    angle_dtype: str = "bf16"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    row_parts: int = 0

    def check(self) -> None:
        """Raises CompileError for heads that no template computes."""
        if self.rope not in ROPE_STYLES:
            hint = f"one of: {', '.join(ROPE_STYLES)}"
            raise CompileError(f"attention knows no rope style {self.rope!r}", hint=hint)
        if self.heads % self.kv_heads:
            raise CompileError(f"{self.heads} heads are not a multiple of {self.kv_heads}")

    @property
    def group(self) -> int:
        """Query heads of one key-value head."""
        return self.heads // self.kv_heads

    @property
    def row(self) -> int:
        """Elements of a packed row [q | k | v]."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def places(self) -> dict[str, int]:
        """Constants of the packed row."""
        k_at = self.heads * self.head_dim
        return {"Q_AT": 0, "K_AT": k_at, "V_AT": k_at + self.kv_heads * self.head_dim}

    @property
    def rotated(self) -> int:
        """Dimensions that turn."""
        return 0 if self.rope == "none" else self.rotary_dim or self.head_dim

    @property
    def cap(self) -> float:
        """The soft cap in units of log2, 0 for none."""
        return self.softcap * LOG2_E

    @property
    def factor(self) -> float:
        """What products are multiplied by to be scores in log2, or the argument of the cap."""
        return self.scale * LOG2_E * (2.0 / self.softcap if self.softcap else 1.0)

    def parameters(self) -> dict[str, object]:
        """What the templates of scores are rendered with."""
        padded = self.head_dim != power_of_two(self.head_dim)
        shown = {"sinks": self.sinks, "window": self.window, "cap": self.cap}
        return shown | {"factor": self.factor, "d_padded": padded}


def _present(kinds: dict[str, str], absent: set[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, kind) for name, kind in kinds.items() if name not in absent)


_SPLITS = 64  # that a merging kernel holds at least, so that many splits share one
MERGES = ("none", "last", "reduce")


def attention_decode(
    op: Heads,
    *,
    block: int,
    stages: int,
    merge: str = "none",
    share: int = 1,
    max_splits: int = 1,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """One new token a sequence, grid (sequences, kv_heads, splits).

    A sequence takes one more split for every `share` blocks of old tokens. With `merge` "last" the
    last of them to arrive, at most `max_splits`, merges; with "reduce" their sums go to partial_ptr
    fp32 [sequences, kv_heads, splits, group, head_dim] and weight_ptr, without the last, for
    attention_reduce; "none" is one split.
    """
    op.check()
    if merge not in MERGES:
        raise CompileError(f"attention knows no merge {merge!r}", hint=f"one of: {MERGES}")
    kinds = {"row_ptr": "*fp32" if op.row_parts else "*bf16"}
    kinds |= {"cos_ptr": f"*{op.angle_dtype}", "sin_ptr": f"*{op.angle_dtype}"}
    kinds |= {"sinks_ptr": "*fp32", "kv_ptr": "*bf16", "block_table_ptr": "*i32"}
    kinds |= {"context_lens_ptr": "*i32", "partial_ptr": "*fp32", "weight_ptr": "*fp32"}
    kinds |= {"counter_ptr": "*i32", "out_ptr": "*bf16", "table_width": "i32"}
    absent = {
        "none": {"partial_ptr", "weight_ptr", "counter_ptr"},
        "last": {"weight_ptr"},
        "reduce": {"counter_ptr", "out_ptr"},
    }[merge]
    absent |= {"cos_ptr", "sin_ptr"} if op.rope == "none" else set()
    absent |= set() if op.sinks else {"sinks_ptr"}
    constants = {"ROW": op.row} | op.places | {"HKV": op.kv_heads, "GROUP": op.group}
    constants |= {"D": op.head_dim, "R": op.rotated, "PAGE": op.page_tokens, "BLOCK": block}
    constants |= {"BLOCK_G": max(16, power_of_two(op.group))}
    constants |= {"BLOCK_D": power_of_two(op.head_dim), "STAGES": stages}
    constants |= {} if merge == "none" else {"SHARE": share}
    if merge == "last":
        constants |= {"SPLITS": max(_SPLITS, power_of_two(max_splits))}
        constants |= {"GROUP_PADDED": power_of_two(op.group)}
        sums = constants["GROUP_PADDED"] * constants["BLOCK_D"] // (32 * num_warps)
        constants |= {"SOME": max(2, min(16, 64 // max(1, sums)))}  # at most 64 a thread
    return make(
        "attention_decode",
        _present(kinds, absent),
        constants,
        num_warps,
        pdl,
        early,
        stages,
        rope=op.rope,
        merge=merge,
        parts=op.row_parts,
        one_page=op.page_tokens % block == 0,
        **op.parameters(),
    )


def attention_reduce(
    op: Heads,
    *,
    block: int,
    share: int,
    max_splits: int,
    block_d: int = 32,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """Merge up to `max_splits` splits of attention_decode into out [sequences, heads * dim].

    `block` and `share` are those of that kernel.
    """
    kinds = {"context_lens_ptr": "*i32", "partial_ptr": "*fp32", "weight_ptr": "*fp32"}
    kinds |= {"out_ptr": "*bf16", "num_splits": "i32"}
    constants = {"BLOCK": block, "SHARE": share, "HQ": op.heads, "GROUP": op.group}
    constants |= {"D": op.head_dim, "BLOCK_S": power_of_two(max_splits)}
    constants |= {"BLOCK_D": min(block_d, power_of_two(op.head_dim))}
    names = tuple(kinds.items())
    return make("attention_reduce", names, constants, num_warps, pdl, early, window=op.window)


def kv_write(
    op: Heads,
    *,
    q_row: int = 0,
    max_sequences: int = 256,
    num_warps: int = 4,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """Write k and v of a ragged batch to pages, rotate q; `q_row` elements a row of q_out.

    By default q_out_ptr is row_ptr itself. Without rope, q stays where it is.
    """
    op.check()
    kinds = {"row_ptr": "*bf16", "cos_ptr": f"*{op.angle_dtype}", "sin_ptr": f"*{op.angle_dtype}"}
    kinds |= {"q_out_ptr": "*bf16", "kv_ptr": "*bf16", "block_table_ptr": "*i32"}
    kinds |= {"query_start_ptr": "*i32", "context_lens_ptr": "*i32"}
    kinds |= {"num_sequences": "i32", "table_width": "i32"}
    absent = {"cos_ptr", "sin_ptr", "q_out_ptr"} if op.rope == "none" else set()
    constants = {"ROW": op.row, "Q_ROW": q_row or op.row} | op.places
    constants |= {"HQ": op.heads, "HKV": op.kv_heads, "D": op.head_dim, "R": op.rotated}
    constants |= {"PAGE": op.page_tokens, "BLOCK_Q": power_of_two(op.heads)}
    constants |= {"BLOCK_KV": power_of_two(op.kv_heads), "BLOCK_D": power_of_two(op.head_dim)}
    constants |= {"BLOCK_SEQ": power_of_two(max_sequences)}
    names = _present(kinds, absent)
    return make("kv_write", names, constants, num_warps, pdl, early, rope=op.rope)


def attention_prefill(
    op: Heads,
    *,
    block_m: int,
    block_n: int,
    stages: int,
    q_row: int = 0,
    max_sequences: int = 256,
    num_warps: int = 8,
    pdl: bool = True,
    early: bool = True,
) -> KernelSource:
    """A ragged batch whose k and v are in the pages; q rotated, `q_row` elements a row.

    Any mix of prefill chunks and decoding sequences. Out [tokens, heads * head_dim].
    """
    op.check()
    if op.group > block_m:
        raise CompileError(f"a group of {op.group} heads needs block_m of that many rows")
    kinds = {"q_ptr": "*bf16", "sinks_ptr": "*fp32", "kv_ptr": "*bf16", "block_table_ptr": "*i32"}
    kinds |= {"query_start_ptr": "*i32", "context_lens_ptr": "*i32", "out_ptr": "*bf16"}
    kinds |= {"num_sequences": "i32", "table_width": "i32"}
    constants = {"Q_ROW": q_row or op.row, "HKV": op.kv_heads, "GROUP": op.group}
    constants |= {"D": op.head_dim, "PAGE": op.page_tokens, "TOKENS": block_m // op.group}
    constants |= {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": power_of_two(op.head_dim)}
    constants |= {"BLOCK_SEQ": power_of_two(max_sequences), "STAGES": stages}
    names = _present(kinds, set() if op.sinks else {"sinks_ptr"})
    return make(
        "attention_prefill",
        names,
        constants,
        num_warps,
        pdl,
        early,
        stages,
        one_page=op.page_tokens % block_n == 0,
        **op.parameters(),
    )
