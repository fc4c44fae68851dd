"""Time of one operator on one device: a roofline with the shares that a target reached.

In: the record of an operator, the sizes of a step, how TP and EP cut it. Out: microseconds. Joins
reading and computing as a roofline does (docs/partition.md); knows no model and no GPU by name.
"""

import math
from dataclasses import dataclass

from sitsc.core.calibration import Calibration
from sitsc.core.hardware import TargetData
from sitsc.core.tiles import GEMV_TOKENS, SKINNY_TOKENS
from sitsc.passes.cost_formulas import experts_share
from sitsc.passes.model_record import (
    ATTENTION,
    COLUMN,
    EMBEDDING,
    EXPERTS,
    HEADS,
    LINEAR,
    ROW,
    VOCABULARY,
    Heads,
    Op,
)

_TILE = 128  # rows and columns of a tile of a library product
_SPLIT_HEADS = 16  # as many sequences times KV heads leave most of a GPU idle
_NORM_PASSES = 3  # a norm apart reads the stream and what is added to it, and writes the sum


@dataclass(frozen=True, slots=True)
class Sizes:
    """New tokens of a step, rows that need logits, sequences, tokens before those of each."""

    tokens: int
    rows: int
    sequences: int
    context: int


@dataclass(frozen=True, slots=True)
class Cut:
    """Ranks that share a layer: `tp` in all, of which `ep` groups hold whole experts.

    `imbalance` is how many times the mean the busiest expert group gets.
    """

    tp: int = 1
    ep: int = 1
    imbalance: float = 1.0


@dataclass(frozen=True, slots=True)
class Device:
    """One device's limits in SI units, resolved from its target and calibration.

    `host_us` is what the host takes to launch a kernel where no CUDA graph does it: in prompts.
    """

    read: float
    flops: dict[str, float]
    kernel_us: float
    read_share: float
    fill_power: float
    matmul_share: float
    flops_per_exp: float
    host_us: float
    num_sms: int

    @property
    def gpu(self) -> bool:
        return self.num_sms > 0

    def filled(self, rows: float, columns: float) -> float:
        """How well tiles of a library product fill the multiprocessors: a power of the share.

        Below 1, because libraries split what would leave too many of them idle.
        """
        if not self.num_sms:
            return 1.0
        tiles = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
        waves = math.ceil(tiles / self.num_sms)
        return (tiles / (waves * self.num_sms)) ** self.fill_power


def device_of(data: TargetData, calibration: Calibration | None) -> Device:
    """The limits of a target; without calibration it reaches its ceilings."""
    ceilings = data.target.ceilings
    flops = {k.removesuffix("_flops"): v.value for k, v in ceilings.items() if "_flops" in k}

    def value(name: str, usual: float) -> float:
        return usual if calibration is None else calibration.value(name)

    gap = ceilings["launch_seconds"].value
    read, read_share = ceilings["read_bytes_per_s"].value, value("read_share", 1.0)
    if data.cuda is None:  # a CPU reads everything by the same loops
        read, read_share = read * read_share, 1.0
    return Device(
        read=read,
        flops=flops,
        kernel_us=1e6 * (gap + value("kernel_seconds", 0.0)),
        read_share=read_share,
        fill_power=value("fill_power", 0.0),
        matmul_share=value("matmul_share", 1.0),
        flops_per_exp=value("flops_per_exp", 0.0),
        host_us=1e6 * value("host_seconds", 0.0),
        num_sms=data.cuda.num_sms if data.cuda is not None else 0,
    )


@dataclass(frozen=True, slots=True)
class OpTime:
    """Microseconds of one operator on one device, what it moves and computes, and its limit.

    `kernels` is how many are launched for it.
    """

    us: float
    bytes: float
    flops: float
    limit_us: float
    kernels: int


def op_time(op: Op, sizes: Sizes, cut: Cut, device: Device) -> OpTime:
    """The time of one call on one device of `cut`."""
    if op.kind == ATTENTION and op.heads is not None:
        return _attention(op, op.heads, sizes, cut, device)
    count = sizes.tokens if op.rows == "tokens" else sizes.rows
    if op.kind == EXPERTS and op.experts is not None:
        return _experts(op, count, cut, device)
    if op.kind == LINEAR:
        return _linear(op, count, cut, device)
    share = cut.tp if op.role == HEADS else 1
    moved = op.read_bytes + count * (op.in_bytes + op.out_bytes) / share
    return _timed(moved, op.flops * count / share, op.dtype, count, device, 1)


def kv_heads_of(heads: Heads, tp: int) -> float:
    """KV heads of one rank: at least one, which several ranks then hold alike."""
    return max(1, heads.kv_heads // tp)


def output_share(op: Op, tp: int) -> float:
    """The share of a linear layer's outputs that one rank computes."""
    if op.role not in (COLUMN, VOCABULARY):
        return 1.0
    if op.heads is None or op.feeds == "q":
        return 1 / tp
    ours, all_ = 2 * kv_heads_of(op.heads, tp), 2 * op.heads.kv_heads
    if op.feeds == "qkv":
        ours, all_ = ours + op.heads.heads / tp, all_ + op.heads.heads
    return ours / all_


def weight_share(op: Op, cut: Cut) -> float:
    """The share of an operator's weights that one rank holds."""
    if op.kind == LINEAR:
        return output_share(op, cut.tp) / (cut.tp if op.role == ROW else 1)
    if op.kind == EXPERTS or (op.kind == EMBEDDING and op.role == VOCABULARY):
        return 1 / cut.tp
    return 1.0


def _linear(op: Op, rows: int, cut: Cut, device: Device) -> OpTime:
    outputs = output_share(op, cut.tp)
    inputs = 1 / cut.tp if op.role == ROW else 1.0
    moved = op.read_bytes * outputs * inputs
    moved += rows * (op.in_bytes * inputs + op.out_bytes * outputs)
    flops = rows * op.flops * outputs * inputs
    filled = device.filled(rows, op.outputs * outputs) if rows > SKINNY_TOKENS else 1.0
    found = _timed(moved, flops / filled, op.dtype, rows, device, 1, matmul=True)
    extra, kernels = 0.0, 0
    if device.gpu and op.norm and rows > GEMV_TOKENS:  # a kernel of its own, beyond few rows
        extra, kernels = extra + rows * op.in_bytes * _NORM_PASSES, kernels + 1
    if device.gpu and op.glu and rows > SKINNY_TOKENS:  # the library computes the product alone
        extra, kernels = extra + 2 * rows * op.out_bytes * outputs, kernels + 1
    us = found.us + 1e6 * extra / device.read + kernels * device.kernel_us
    return OpTime(us, found.bytes + extra, flops, found.limit_us * filled, 1 + kernels)


def _experts(op: Op, rows: int, cut: Cut, device: Device) -> OpTime:
    """The busiest rank of an expert layer: weights of the experts chosen, cut by what EP leaves."""
    assert op.experts is not None
    shape, within = op.experts, cut.tp // cut.ep
    local = shape.experts / cut.ep
    hit = local * experts_share(shape.experts, shape.top_k, rows)
    busiest = min(local, hit * (cut.imbalance if cut.ep > 1 else 1.0))
    moved = op.read_bytes * busiest / shape.experts / within
    share = min(1.0, cut.imbalance / cut.ep) if cut.ep > 1 else 1.0
    moved += rows * (op.in_bytes + op.out_bytes) * share
    flops = rows * op.flops * share / within
    per_expert = max(1, round(rows * shape.top_k / max(1.0, shape.experts * hit / local)))
    kernels = 4 if device.gpu else 1  # route, gate and up, down, sum
    return _timed(moved, flops, op.dtype, per_expert, device, kernels, matmul=True)


def _attention(op: Op, h: Heads, sizes: Sizes, cut: Cut, device: Device) -> OpTime:
    length = sizes.context + sizes.tokens // sizes.sequences
    pairs = sizes.tokens * (sizes.context + (sizes.tokens // sizes.sequences + 1) / 2)
    if h.window:
        length, pairs = min(length, h.window), min(pairs, sizes.tokens * h.window)
    heads = h.heads / cut.tp
    kv_bytes = 2 * sizes.sequences * length * kv_heads_of(h, cut.tp) * h.dim * h.itemsize
    moved = kv_bytes + sizes.tokens * (op.in_bytes + op.out_bytes) / cut.tp
    flops = 4 * pairs * heads * h.dim
    dtype = "bfloat16" if device.gpu else op.dtype
    work = flops / device.matmul_share + pairs * heads * device.flops_per_exp
    compute_us = 1e6 * work / device.flops[dtype]
    read_us = 1e6 * moved / (device.read * device.read_share)
    limit = 1e6 * max(moved / device.read, flops / device.flops[dtype])
    split = sizes.sequences * kv_heads_of(h, cut.tp) <= _SPLIT_HEADS  # then sums are joined apart
    writes = sizes.tokens > sizes.sequences  # of prompts, keys and values are stored apart
    kernels = 1 + (device.gpu and (split or writes))
    us = max(read_us, compute_us) + kernels * device.kernel_us
    return OpTime(us, moved, flops, limit, kernels)


def _timed(
    moved: float,
    flops: float,
    dtype: str,
    rows: int,
    device: Device,
    kernels: int,
    *,
    matmul: bool = False,
) -> OpTime:
    share = device.read_share if matmul and rows > GEMV_TOKENS else 1.0
    peak = device.flops.get(dtype, device.flops["float32"])
    read_us = 1e6 * moved / (device.read * share)
    compute_us = 1e6 * flops / (peak * (device.matmul_share if matmul else 1.0))
    us = max(read_us, compute_us) + kernels * device.kernel_us
    limit_us = 1e6 * max(moved / device.read, flops / peak)
    return OpTime(us, moved, flops, limit_us, kernels)
