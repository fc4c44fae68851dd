"""Tiles worth measuring, for each operation and number of tokens.

In: an operation, the tokens of a step, what the GPU has. Out: templates with tile parameters, the
likeliest first, all of which fit in shared memory and, by estimate, in registers. The ranges are
those that won or came close on an H200. Measures nothing.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from sitsc.codegen import cuda_attention_hopper as hopper
from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_instance import power_of_two
from sitsc.codegen.cuda_linear import WIDE_TOKENS, Linear
from sitsc.core.hardware import CudaLimits
from sitsc.core.tiles import wide_supported

_GEMV_TOKENS = 4  # at most that many on CUDA cores
_SKINNY_TOKENS = 128  # at most that many on tensor cores, weights on the M side
_MOST_SPLITS = 64
_SHARED_OPERANDS = (90, 100)  # tensor cores of these read operands from shared memory
_TENSOR_ROWS = 64
_PREFILL_ROWS = ((128, 8), (128, 4), (64, 4), (64, 8))  # rows and warps
_THREAD_REGISTERS = 176  # of 255; the rest for addresses
# Registers for the rows' tokens and heads where the group is no power of two: the assembler of
# sm_120 keeps them through the loop, those of other architectures compute them again at the end.
_UNEVEN_GROUP = {120: 8}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A template and the parameters of its tile, for `instance(template, op, **tile)`.

    `programs` are grids for a gemv or a Hopper attention, likeliest first; empty where the grid is
    no choice.
    """

    template: str
    tile: dict[str, Any]
    programs: tuple[int, ...] = ()


def candidates(op: Linear | Heads, tokens: int, gpu: CudaLimits) -> tuple[Candidate, ...]:
    """Tiles for a linear op of `tokens` tokens, or for decode attention of `tokens` sequences.

    More than 128 tokens of a linear op have none, on sm_90 more than 256: that is a library's
    product. Decode attention has tiles with one split and with several; `split_counts` says how
    many.
    """
    if isinstance(op, Heads):
        return tuple(_decode(op, tokens, gpu))
    found = list(_gemv(op, tokens, gpu)) if tokens <= _GEMV_TOKENS else []
    found += _skinny(op, tokens, gpu) if 2 < tokens <= _SKINNY_TOKENS else []
    return tuple([*found, *_wide(op, tokens, gpu)])


def split_counts(op: Heads, sequences: int, gpu: CudaLimits) -> tuple[int, ...]:
    """Splits of the keys that fill the GPU one, two and four times, the likeliest first; and 1."""
    programs = sequences * op.kv_heads
    wanted = [min(_MOST_SPLITS, max(1, round(gpu.num_sms * n / programs))) for n in (2, 1, 4)]
    return tuple(dict.fromkeys([*wanted, 1]))


def prefill_candidates(op: Heads, gpu: CudaLimits, sequences: int = 1) -> tuple[Candidate, ...]:
    """Tiles of prefill attention of that many sequences; the first where nothing was measured."""
    found: list[Candidate] = []
    if hopper.supported(op, gpu.sm) and sequences <= hopper.MOST_SEQUENCES:
        found.append(Candidate("attention_prefill_hopper", hopper.tile(op), (gpu.num_sms,)))
    padded = power_of_two(op.head_dim)
    uneven = 0 if op.group == power_of_two(op.group) else _UNEVEN_GROUP.get(gpu.sm, 0)
    for (m, warps), n, stages in product(_PREFILL_ROWS, (64, 128, 32), (3, 2, 4)):
        shared = (2 * stages * n + m) * padded * 2
        fits = _prefill_fits(m, n, padded, 32 * warps, gpu.sm, uneven)
        if shared <= gpu.shared_bytes and fits:
            tile = {"block_m": m, "block_n": n, "stages": stages, "num_warps": warps}
            found.append(Candidate("attention_prefill", tile))
    return tuple(found)


def _prefill_fits(m: int, n: int, dim: int, threads: int, sm: int, more: int) -> bool:
    """Whether scores and sums stay in registers, and where they are operands too, q and weights.

    `more` registers a thread are taken by something else.
    """
    if sm in _SHARED_OPERANDS:
        return m * (n + dim) // threads + more <= 96
    return m * (n + dim) * 3 // (2 * threads) + dim // 32 + more <= 124


def _programs(groups: int, split: int, gpu: CudaLimits) -> tuple[int, ...]:
    """Grids of one to four programs a multiprocessor, and those that deal the groups evenly."""
    found: list[int] = []
    for times in (4, 3, 2, 1):
        most = max(1, min(groups, gpu.num_sms * times // split))
        rounds = -(-groups // most)
        found += [most, -(-groups // rounds)]
    return tuple(dict.fromkeys(found))


def _gemv(op: Linear, tokens: int, gpu: CudaLimits) -> Iterator[Candidate]:
    widest = power_of_two(op.columns)
    for block_k, block_n, warps in product((4096, 2048, 1024, 512), (2, 4, 8), (4, 8)):
        if block_k > max(widest, 512):
            continue
        blocks = -(-op.columns // block_k)
        splits = {1} if op.norm or op.columns % block_k or blocks > 16 else {1, blocks}
        for split, stages in product(sorted(splits), (0, 3, 5)):
            parts, threads = -(-blocks // split), warps * 32
            sums = block_n * block_k * op.sides / threads
            x = parts * block_k * tokens / threads
            weights = parts * sums / 2 * (1 if stages else 2)
            if sums < 16 or x + weights + sums / 2 > _THREAD_REGISTERS:
                continue
            if parts > 1 and block_k < 2048:  # more blocks of the same columns: more registers
                continue
            if stages * parts * block_n * block_k * op.sides * 2 > gpu.shared_bytes:
                continue
            tile = {"block_n": block_n, "block_k": block_k, "stages": stages, "split": split}
            tile |= {"tokens": tokens, "num_warps": warps}
            yield Candidate("gemv", tile, _programs(-(-op.rows // block_n), split, gpu))
    for block_n, block_k in ((4, 1024), (8, 512), (2, 2048)):
        if block_k <= widest and block_n * block_k * op.sides * tokens / 128 <= 96:
            tile = {"tokens": tokens, "block_n": block_n, "block_k": block_k}
            yield Candidate("gemv_walk", tile)


def _skinny(op: Linear, tokens: int, gpu: CudaLimits) -> Iterator[Candidate]:
    block_t = max(8 if gpu.sm in _SHARED_OPERANDS else 16, power_of_two(tokens))
    blocks = [(*block, split) for block in _blocks(block_t) for split in (1, 2, 4, 8)]
    blocks.sort(key=lambda block: round(abs(math.log2(_filled(op, block, gpu) / 2))))
    folds = {n: _fold(op, n, block_t, gpu) for n, *_ in blocks}
    ways = [(True, block, fold) for block in blocks for fold in {1, folds[block[0]]}]
    ways += [(False, block, 1) for block in blocks]
    for ahead, (n, k, warps, split), fold in ways:
        programs = -(-op.rows // n) * split
        if (split > 1 and programs > 4 * gpu.num_sms) or op.columns % (split * k * fold):
            continue
        if op.norm and not _norm_fits(op, n, k, block_t, warps):
            continue
        depth = -(-op.columns // (split * k * fold))
        most = min(depth + 1, _most_stages(op, n * fold, k, block_t * fold, ahead, gpu))
        for stages in sorted({min(stages, most) for stages in (4, 6, 3, 5)} - {0, 1}):
            tile = {"block_t": block_t, "block_n": n, "block_k": k, "split": split}
            tile |= {"stages": stages, "ahead": ahead, "num_warps": warps}
            yield Candidate("skinny", tile | ({"fold": fold} if fold > 1 else {}))
            if not ahead:
                yield Candidate("skinny", tile | {"prefetch_bytes": 1024})


def _fold(op: Linear, n: int, block_t: int, gpu: CudaLimits) -> int:
    """How often columns are folded: until tensor cores have 64 rows, where they want as many."""
    may = gpu.sm in _SHARED_OPERANDS and not op.norm and n < _TENSOR_ROWS and block_t <= 32
    return _TENSOR_ROWS // n if may else 1


def _wide(op: Linear, tokens: int, gpu: CudaLimits) -> Iterator[Candidate]:
    """Blocks of the copy engine; those that give each multiprocessor one or two programs first."""
    low, high = WIDE_TOKENS
    if op.norm or not low <= tokens <= high or not wide_supported(op.columns, gpu.sm):
        return
    shapes = [(t, n) for t in _wide_tokens(tokens) for n in (64, 128, 32, 256)]
    splits = (1, 2, 4, 8) if op.epilogue == "parts" else (1,)
    blocks = [(t, n, split) for t, n in shapes for split in splits]

    def programs(block: tuple[int, int, int]) -> float:
        tiles = -(-tokens // block[0])
        return _filled(op, (block[1], 0, 0, block[2]), gpu) * tiles

    blocks.sort(key=lambda block: round(2 * abs(math.log2(programs(block) / 1.5))))
    for t, n, split in blocks:
        rows = n * op.sides
        if rows > (256 if t < 256 else 128) or op.columns < 64 * split:
            continue
        for stages in (4, 3, 6, 8):
            if (rows + t) * 128 * stages + 1024 <= gpu.shared_bytes:
                tile = {"block_t": t, "block_n": n, "split": split, "stages": stages}
                yield Candidate("wide", tile)


def _wide_tokens(tokens: int) -> tuple[int, ...]:
    """Tokens a program, the likeliest first."""
    return (64,) if tokens <= 64 else (128,) if tokens <= 128 else (128, 256)


def _filled(op: Linear, block: tuple[int, int, int, int], gpu: CudaLimits) -> float:
    """Programs a multiprocessor."""
    return -(-op.rows // block[0]) * block[3] / gpu.num_sms


def _blocks(block_t: int) -> tuple[tuple[int, int, int], ...]:
    """Rows and columns of a block of weights and warps, the likeliest first."""
    if block_t <= 16:
        narrow = ((32, 256, 4), (16, 256, 4), (32, 128, 4), (16, 512, 4))
        return ((64, 128, 4), (64, 256, 4), (128, 128, 8), *narrow)
    if block_t <= 64:
        return ((64, 128, 4), (128, 64, 4), (64, 64, 4), (128, 128, 8), (64, 256, 4), (32, 256, 4))
    return ((128, 64, 8), (64, 128, 4), (128, 128, 8), (64, 64, 4), (128, 64, 4), (256, 64, 8))


def _norm_fits(op: Linear, n: int, k: int, t: int, warps: int) -> bool:
    """Whether squares of x and the sums stay in registers; below 64 rows x is kept twice."""
    x, sums = k * t // (warps * 32), n * t * op.sides // (warps * 32)
    return x * 3 // 2 + sums <= 136 and (n >= 64 or x <= 16)


def _most_stages(op: Linear, n: int, k: int, t: int, ahead: bool, gpu: CudaLimits) -> int:
    """Stages of weights, and of x unless it comes through registers, that shared memory holds."""
    stage = (n * op.sides + (0 if ahead else t)) * k * 2
    return (gpu.shared_bytes - (t * k * 2 if ahead else 0) - 1024) // stage


def _decode(op: Heads, sequences: int, gpu: CudaLimits) -> Iterator[Candidate]:
    """Few sequences want splits and wide blocks, many want small programs, all at once."""
    padded = power_of_two(op.head_dim)
    few = sequences * op.kv_heads < 2 * gpu.num_sms
    wide = ((64, 4, 3), (64, 4, 4), (64, 8, 3), (32, 2, 4), (64, 2, 3), (32, 1, 4), (32, 4, 4))
    small = ((32, 1, 4), (16, 1, 5), (32, 2, 4), (32, 2, 3), (32, 1, 3), (64, 2, 3), (64, 4, 3))
    several = (("last", 2), ("reduce", 2), ("last", 4), ("reduce", 4), ("none", 1))
    merges = several if few else (("none", 1), ("last", 8))
    pairs = [
        pair for i in range(7) for pair in product(merges, (wide if few else small)[i : i + 1])
    ]
    for (merge, share), (block, warps, stages) in pairs:
        times = max(1, padded // 128)
        while block > 16 and block * padded > (128 if warps > 1 else 64) * 32 * warps:
            block //= 2
        if stages * 4 * block * padded <= gpu.shared_bytes:
            tile = {"block": block, "stages": stages, "share": share * times, "merge": merge}
            yield Candidate("attention_decode", tile | {"num_warps": warps})
