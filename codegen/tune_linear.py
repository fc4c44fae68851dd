"""What is tried for a linear layer of a decode step: kernels and tiles, as a table would say them.

In: a layer's shape, tokens, the table, what the GPU has. Out: choices, the likeliest first. Nothing
is compiled or measured.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sitsc.codegen.cuda_candidates import Candidate, candidates
from sitsc.codegen.cuda_linear import Linear, scaling_programs
from sitsc.core.hardware import CudaLimits
from sitsc.core.tiles import (
    NORM_PROGRAMS,
    SKINNY_TOKENS,
    TileChoice,
    TileTable,
    choose_linear,
    wide_bytes,
)

_RANK_WEIGHT = 1.5  # how much being likely counts against being different from those chosen
_GEMV_TOKENS = 2  # up to that many the norm stays in the kernel
_WIDE_NORM = 4  # programs a row of a norm before a wide kernel
_LIBRARY_TOKENS = 3  # from that many on the library is worth a try


@dataclass(frozen=True, slots=True)
class Choice:
    """What a table entry would say; `family` counts those that differ in more than the grid."""

    kernel: str
    tile: dict[str, int]
    family: int
    current: bool = False


def linear_choices(
    shape: dict[str, Any], tokens: int, table: TileTable, gpu: CudaLimits, most: int, parts: bool
) -> Iterator[Choice]:
    """Today's choice, the same with other triggers and norms, the library, then candidates.

    With `parts`, layers of the step leave sums in parts, so norms keep kernels of their own.
    """
    now = choose_linear(table.linear, shape, tokens, gpu.num_sms, wide_bytes(gpu))
    op = Linear(**shape)
    yield Choice(now.kernel, now.tile, 0, True)
    if now.kernel != "library":
        yield Choice(now.kernel, flipped(now.tile), 1)
    if programs := now.tile.get("separate_norm"):
        other = {"separate_norm": NORM_PROGRAMS if programs == 1 else 1}
        yield Choice(now.kernel, now.tile | other, 2)
    if now.tile.get("scaled"):
        yield from _scaled(op, now.tile, tokens, gpu, most)
        return
    in_parts = bool(now.tile.get("parts"))
    if tokens >= _LIBRARY_TOKENS and not op.bias and (not in_parts or op.epilogue == "residual"):
        yield Choice("library", {}, 3)
    if in_parts:
        yield from _in_parts(op, now.tile, tokens, gpu, most)
        return
    if now.kernel in ("library", "wide"):
        wide = list(_wide(op, tokens, gpu, most))
        yield from wide
        if wide and tokens > SKINNY_TOKENS:
            return
    yield from _others(op, now, tokens, gpu, most, apart_only=parts)


def _others(
    op: Linear, now: TileChoice, tokens: int, gpu: CudaLimits, most: int, *, apart_only: bool
) -> Iterator[Choice]:
    """Kernels with the norm inside, unless it is apart already and must be, and with it apart."""
    programs = now.tile.get("separate_norm", 0)
    inside = () if apart_only and programs else candidates(op, tokens, gpu)
    apart: tuple[Candidate, ...] = ()
    if op.norm and tokens > _GEMV_TOKENS:
        apart = tuple(
            replace(one, tile=one.tile | {"separate_norm": programs or 1})
            for one in candidates(replace(op, norm=False), tokens, gpu)
            if not one.template.startswith("gemv")
        )
    share = most // 3 if apart else most
    for family, one in enumerate([*spread(inside, share), *spread(apart, most - share)], 4):
        for tile in _tiles(one):
            yield Choice(one.template, tile, family)


def _wide(op: Linear, tokens: int, gpu: CudaLimits, most: int) -> Iterator[Choice]:
    """Where a library's product is what to beat: norms apart, sums for a norm in parts."""
    more = {} if op.norm or op.epilogue == "glu" else {"parts": 1}
    plain = _leaving_parts(op) if more else replace(op, norm=False, x_dtype="bf16")
    wide = [one for one in candidates(plain, tokens, gpu) if one.template == "wide"]
    for family, one in enumerate(spread(wide, most), 4):
        for programs in (1, _WIDE_NORM) if op.norm else (0,):
            norm = {"separate_norm": programs} if programs else {}
            yield Choice(one.template, {**one.tile, **more, **norm}, family)


def _in_parts(
    op: Linear, now: dict[str, int], tokens: int, gpu: CudaLimits, most: int
) -> Iterator[Choice]:
    """Kernels that leave sums in parts; attention adds as many to its row as it did."""
    more = {"parts": 1} | {k: v for k, v in now.items() if k == "separate_norm"}
    found = [
        replace(one, tile=one.tile | more)
        for one in candidates(_leaving_parts(op), tokens, gpu)
        if not one.template.startswith("gemv")
        and (one.tile["split"] == now["split"] or op.epilogue == "residual")
    ]
    for family, one in enumerate(spread(found, most), 4):
        for tile in _tiles(one):
            yield Choice(one.template, tile, family)


def _scaled(
    op: Linear, now: dict[str, int], tokens: int, gpu: CudaLimits, most: int
) -> Iterator[Choice]:
    """Kernels of as many programs: the reader of a scaled sum adds a square from each of them."""
    wanted = scaling_programs(op.rows, now)
    found: list[Candidate] = []
    for one in candidates(op, tokens, gpu):
        if one.template == "wide":  # scales nothing
            continue
        programs = tuple(
            tile.get("programs", 0)
            for tile in _tiles(one)
            if scaling_programs(op.rows, tile) == wanted and tile.get("split", 1) == 1
        )
        if programs:
            found.append(replace(one, programs=programs if one.programs else ()))
    for family, one in enumerate(spread(found, most), 4):
        for tile in _tiles(one):
            yield Choice(one.template, tile | {"scaled": 1}, family)


def _leaving_parts(op: Linear) -> Linear:
    """The product alone, its sums left to the next kernel."""
    return replace(op, norm=False, x_dtype="bf16", epilogue="parts", out_dtype="fp32", bias=False)


def flipped(tile: dict[str, int]) -> dict[str, int]:
    """The same tile with the other trigger of the next kernel."""
    return tile | {"early": 1 - tile.get("early", 1)}


def _tiles(candidate: Candidate) -> Iterator[dict[str, int]]:
    """The tile as a table writes it, on each of its grids."""
    tile = {name: int(value) for name, value in candidate.tile.items() if name != "tokens"}
    yield from [tile | {"programs": count} for count in candidate.programs] or [tile]


def spread(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """At most `most` candidates: likely ones, but each unlike those before it.

    The next is the one whose parameters were taken least often so far, its place in `found`
    counting as well.
    """
    left = list(enumerate(found))
    taken: Counter[tuple[str, Any]] = Counter()
    chosen: list[Candidate] = []
    while left and len(chosen) < most:

        def cost(item: tuple[int, Candidate]) -> float:
            seen = sum(taken[feature] for feature in _features(item[1]))
            return seen / max(1, len(chosen)) + _RANK_WEIGHT * item[0] / len(found)

        best = min(left, key=cost)
        left.remove(best)
        taken.update(_features(best[1]))
        chosen.append(best[1])
    return chosen


def _features(candidate: Candidate) -> list[tuple[str, Any]]:
    """What makes candidates alike: template, each parameter, and the block as a whole."""
    tile = candidate.tile
    block = tuple(tile.get(name) for name in ("block_n", "block_k", "num_warps"))
    return [("template", candidate.template), ("block", block), *tile.items()]
