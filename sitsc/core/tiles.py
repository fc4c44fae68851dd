"""Tile tables: which kernel and tile a layer takes, from measurements or from a rule.

In: the shape of a linear layer or of attention's heads, the tokens of the bucket, the target. Out:
a `TileChoice`. Entries of data/tiles/<target>.json carry their evidence; a shape without one gets
the rule below, which depends on sizes and on the number of multiprocessors alone.
"""

import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

from sitsc.core.errors import PlanError
from sitsc.core.hardware import CudaLimits
from sitsc.core.records import from_value, to_value

GEMV_TOKENS, SKINNY_TOKENS, _WIDE_TOKENS = 2, 64, 128
_WHOLE_ROW, NORM_PROGRAMS = 4096, 8
_MOST_SPLITS, _STAGE_BYTES = 32, 96 << 10
WIDE_COLUMNS, _WIDE_SM = 8, 90  # the copy engine takes 16 bytes at least
_WIDE_WEIGHTS = 1 << 22  # elements of W from which on the wide kernel was faster
_MOST_SHARES, _MOST_STAGES = 4, 8


@dataclass(frozen=True, slots=True)
class TileChoice:
    """A kernel of the linear family and its tile; `source` says whether it was measured."""

    kernel: str
    tile: dict[str, int]
    source: str


@dataclass(frozen=True, slots=True)
class TileEntry:
    """One measured choice: for this shape, from `low` to `high` tokens, both included."""

    rows: int
    columns: int
    norm: bool
    epilogue: str
    out_dtype: str
    low: int
    high: int
    kernel: str
    tile: dict[str, int]
    evidence: dict[str, Any]

    def shape(self) -> tuple[int, int, bool, str, str]:
        """What of the layer the entry is for."""
        return self.rows, self.columns, self.norm, self.epilogue, self.out_dtype


@dataclass(frozen=True, slots=True)
class AttentionEntry:
    """One measured choice for decode attention of `low` to `high` sequences, both included."""

    q_heads: int
    kv_heads: int
    head_dim: int
    low: int
    high: int
    tile: dict[str, int]
    evidence: dict[str, Any]

    def shape(self) -> tuple[int, int, int]:
        """What of the heads the entry is for."""
        return self.q_heads, self.kv_heads, self.head_dim


@dataclass(frozen=True, slots=True)
class TileTable:
    """All entries of a target."""

    linear: tuple[TileEntry, ...] = ()
    attention: tuple[AttentionEntry, ...] = ()


def shape_of(shape: dict[str, Any]) -> tuple[int, int, bool, str, str]:
    """The parts of a linear layer's shape that its tile depends on.

    A residual stream has the same tiles in both of its types.
    """
    return (
        shape["rows"],
        shape["columns"],
        shape["norm"],
        shape["epilogue"],
        "bf16" if shape["epilogue"] == "residual" else shape["out_dtype"],
    )


def heads_of(shape: dict[str, Any]) -> tuple[int, int, int]:
    """The parts of attention's shape that its tile depends on."""
    return shape["q_heads"], shape["kv_heads"], shape["head_dim"]


def load_table(target: str) -> TileTable:
    """The measured entries of a target; none when it has no file."""
    file = resources.files("sitsc").joinpath(f"data/tiles/{target}.json")
    return read_table(file.read_text(), f"tiles/{target}") if file.is_file() else TileTable()


def read_table(text: str, where: str) -> TileTable:
    """The entries of a table's text. Raises PlanError naming `where`."""
    try:
        return from_value(TileTable, json.loads(text), where)
    except ValueError as error:
        raise PlanError(f"no tile table: {error}", where=where) from None


def table_text(table: TileTable) -> str:
    """The text of a table, an entry a line, by shape and tokens."""
    sections = []
    for name, entries in (("linear", table.linear), ("attention", table.attention)):
        ordered = sorted(entries, key=lambda e: (*e.shape(), e.low))
        lines = [json.dumps(to_value(entry), sort_keys=True) for entry in ordered]
        sections.append(f'"{name}": [\n ' + ",\n ".join(lines) + "\n]")
    return "{" + ",\n".join(sections) + "}\n"


def wide_supported(columns: int, sm: int = _WIDE_SM) -> bool:
    """Whether a wide kernel computes layers of so many columns on this architecture."""
    return sm == _WIDE_SM and columns % WIDE_COLUMNS == 0


def wide_bytes(gpu: CudaLimits) -> int:
    """Shared memory for the stages of a wide kernel; 0 where there is none (other than sm_90)."""
    return gpu.shared_bytes - 1024 if gpu.sm == _WIDE_SM else 0


def choose_linear(
    entries: tuple[TileEntry, ...], shape: dict[str, Any], tokens: int, sms: int, wide: int = 0
) -> TileChoice:
    """The measured choice that covers the shape and tokens, else the rule's.

    `wide` is what `wide_bytes` says; 0 leaves the wide kernel out of the rule.
    """
    for entry in entries:
        if entry.shape() == shape_of(shape) and entry.low <= tokens <= entry.high:
            return TileChoice(entry.kernel, entry.tile, "measured")
    if tokens <= GEMV_TOKENS:
        return _gemv(shape, sms)
    if wide and SKINNY_TOKENS // 2 < tokens <= _WIDE_TOKENS and _is_wide(shape):
        return _wide(shape, tokens, sms, wide)
    return (
        _skinny(shape, tokens, sms)
        if tokens <= SKINNY_TOKENS
        else TileChoice("library", {}, "rule")
    )


def choose_attention(
    entries: tuple[AttentionEntry, ...], shape: dict[str, Any], sequences: int, sms: int
) -> TileChoice:
    """The measured tile of decode attention for that many sequences, else the rule's."""
    for entry in entries:
        if entry.shape() == heads_of(shape) and entry.low <= sequences <= entry.high:
            return TileChoice("attention_decode", entry.tile, "measured")
    return _attention(shape, sequences, sms)


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below `value`."""
    return 1 << (value - 1).bit_length()


def _gemv(shape: dict[str, Any], sms: int) -> TileChoice:
    """A row of x in registers while it fits; longer rows are walked."""
    columns = shape["columns"]
    if columns > _WHOLE_ROW:
        tile = {"block_n": 8, "block_k": 512, "depth": 2, "num_warps": 4}
        return TileChoice("gemv_walk", tile, "rule")
    warps = 8 if shape["epilogue"] == "glu" and columns > 2048 else 4
    tile = {"block_n": 2, "block_k": max(64, power_of_two(columns)), "programs": 4 * sms}
    return TileChoice("gemv", tile | {"num_warps": warps, "depth": 1}, "rule")


def _skinny(shape: dict[str, Any], tokens: int, sms: int) -> TileChoice:
    """64 rows a program, split columns until all multiprocessors work; the norm goes before.

    For few tokens several programs share a row of the norm, as many as `separate_norm` says.
    Sums of split columns stay in parts where their reader can add them.
    """
    block_t = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
    programs = -(-shape["rows"] // 64)
    split = 1
    while split < 4 and programs * split < sms and shape["columns"] % (split * 2 * 128) == 0:
        split *= 2
    tile = {"block_t": block_t, "block_n": 64, "split": split, "num_warps": 4}
    tile |= {"separate_norm": NORM_PROGRAMS if tokens <= 8 else 1} if shape["norm"] else {}
    sums = shape["epilogue"] == "residual"
    if split > 1 and (sums or (shape["epilogue"], shape["out_dtype"]) == ("store", "bf16")):
        tile |= {"parts": 1}
    if block_t == 64:  # two accumulators of 64 x 64 leave no room for weights held in advance
        more = {"block_k": 64, "stages": 5, "prefetch_bytes": 1024}
    else:
        more = {"block_k": 128, "stages": 3 if shape["epilogue"] == "glu" else 4, "ahead": 1}
    return TileChoice("skinny", tile | more, "rule")


def _is_wide(shape: dict[str, Any]) -> bool:
    """Layers in which it was faster in every model measured: gate and up, and residual sums."""
    sides = {"glu": 2, "residual": 1}.get(shape["epilogue"], 0)
    weights = sides * shape["rows"] * shape["columns"]
    return weights >= _WIDE_WEIGHTS and wide_supported(shape["columns"])


def _wide(shape: dict[str, Any], tokens: int, sms: int, room: int) -> TileChoice:
    """Rows or shares of columns until most multiprocessors work, stages as far as there is room.

    Two programs share a multiprocessor where there are so many and three stages of both fit.
    """
    glu, rows = shape["epilogue"] == "glu", shape["rows"]
    block_t, block_n, split = 64 if tokens <= 64 else 128, 64, 1
    if glu:
        block_n = next((n for n in (128, 64) if rows >= 0.8 * sms * n), 32)
    while not glu and split < _MOST_SHARES and -(-rows // block_n) * split * 2 <= sms:
        split *= 2
    stage = ((2 if glu else 1) * block_n + block_t) * 128
    shared = -(-rows // block_n) * split > sms and 6 * stage <= room
    stages = min(_MOST_STAGES, room // stage // (2 if shared else 1))
    tile = {"block_t": block_t, "block_n": block_n, "split": split, "stages": stages}
    tile |= {"separate_norm": 1} if shape["norm"] else {}
    return TileChoice("wide", tile if glu else tile | {"parts": 1}, "rule")


def _attention(shape: dict[str, Any], sequences: int, sms: int) -> TileChoice:
    """Splits until the GPU is filled twice; without splits small tiles, so that all are resident.

    Keys and values of all stages take 96 KiB at most.
    """
    dim = power_of_two(shape["head_dim"])
    programs = sequences * shape["kv_heads"]
    splits = max(1, min(_MOST_SPLITS, 2 * sms // programs))
    block, warps = (64, 4) if programs < 3 * sms else (16, 1)
    while block > 16 and block * dim > 64 * 128:
        block //= 2
    warps = max(warps, dim // 128)
    stages = max(2, min(4 if splits == 1 else 3, _STAGE_BYTES // (4 * block * dim)))
    tile = {"block": block, "stages": stages, "num_warps": warps, "splits": splits}
    return TileChoice("attention_decode", tile | {"share": 2, "merge": _merge(splits)}, "rule")


def _merge(splits: int) -> int:
    """0: one split; 2: a kernel of its own, which costs less than merging in the last to arrive."""
    return 2 if splits > 1 else 0
