"""The registry of the CUDA kernels: what can be instantiated, on which grid.

In: the name of a template, its shape and tile. Out: a `KernelSource` whose arguments are named and
typed, the grid for run-time sizes, and tiles worth measuring. Chooses nothing.
With dependent launch, kernels read weights, lengths, block tables and (attention_decode) old pages
before they wait: the first kernel of a step must be launched without it, and only `advance`, the
last, may write lengths.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sitsc.codegen import (
    cuda_attention,
    cuda_experts,
    cuda_linear,
    cuda_pointwise,
    cuda_ranks,
    cuda_rows,
    cuda_sampling,
)
from sitsc.codegen.cuda_attention_hopper import attention_prefill_hopper
from sitsc.codegen.cuda_candidates import candidates
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.errors import CompileError
from sitsc.core.kernels import CROSSING_PROGRAMS

__all__ = ["TEMPLATES", "Sizes", "Template", "candidates", "grid", "instance"]

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Run-time sizes of a launch; `rows` are rows of logits, `splits` those of the keys.

    `programs` is how many walk the row groups of a gemv or the tiles of a Hopper attention, 0 for
    one each.
    """

    tokens: int = 1
    sequences: int = 1
    rows: int = 1
    splits: int = 1
    programs: int = 0


@dataclass(frozen=True, slots=True)
class Template:
    """One algorithm: how an instance is built, and how many programs it takes.

    `grid` gets the constants of the instance and the sizes of the launch.
    """

    name: str
    build: Callable[..., KernelSource]
    grid: Callable[[dict[str, Any], Sizes], tuple[int, ...]]


def _cover(constants: dict[str, Any], size: str, block: str) -> int:
    return -(-constants[size] // constants[block])


def _walked(c: dict[str, Any], sizes: Sizes) -> tuple[int, ...]:
    return (min(sizes.programs or c["GROUPS"], c["GROUPS"]) * c["SPLIT"],)


def _tiled(c: dict[str, Any], sizes: Sizes) -> tuple[int, ...]:
    return (_cover(c, "N", "BLOCK_N") * c.get("SPLIT", 1),)


def _row_blocks(c: dict[str, Any], sizes: Sizes) -> tuple[int, ...]:
    return sizes.tokens, _cover(c, "H", "BLOCK")


def _prefill(c: dict[str, Any], sizes: Sizes) -> tuple[int, ...]:
    return -(-sizes.tokens // c["TOKENS"]) + sizes.sequences, c["HKV"]


def _tiles(c: dict[str, Any], sizes: Sizes) -> tuple[int, ...]:
    blocks = -(-sizes.tokens // c["TOKENS"]) + sizes.sequences
    return (min(sizes.programs or sys.maxsize, blocks * c["HQ"] // c["PACK"]),)


_ALL = (
    Template("gemv", cuda_linear.gemv, _walked),
    Template("gemv_walk", cuda_linear.gemv_walk, _tiled),
    Template("skinny", cuda_linear.skinny, _tiled),
    Template("wide", cuda_linear.wide, lambda c, s: (_tiled(c, s)[0] * c["TILES"],)),
    Template("rms_norm", cuda_rows.rms_norm, lambda c, s: (s.tokens, c["BLOCKS"])),
    Template("gather", cuda_rows.gather, _row_blocks),
    Template("rope_table", cuda_rows.rope_table, lambda c, s: (-(-s.tokens // c["BLOCK_T"]),)),
    Template("glu", cuda_rows.glu, _row_blocks),
    Template("pointwise", cuda_pointwise.pointwise, lambda c, s: (s.tokens, c["PARTS"])),
    Template("row_norm", cuda_pointwise.row_norm, lambda c, s: (s.tokens, c["PARTS"])),
    *(
        Template(build.__name__, build, lambda c, s: (s.rows, c["PARTS"]))
        for build in (
            cuda_sampling.sample_scan,
            cuda_sampling.sample_count,
            cuda_sampling.sample_gather,
        )
    ),
    Template("sample_draw", cuda_sampling.sample_draw, lambda c, s: (s.rows,)),
    Template("moe_route", cuda_experts.moe_route, lambda c, s: (s.tokens,)),
    Template("moe_sort", cuda_experts.moe_sort, lambda c, s: (c["E"],)),
    Template(
        "moe_linear",
        cuda_experts.moe_linear,
        lambda c, s: (_cover(c, "N", "BLOCK_N"), c["TILES"]),
    ),
    Template("moe_sum", cuda_experts.moe_sum, _row_blocks),
    Template("all_reduce", cuda_ranks.all_reduce, lambda c, s: (s.programs,)),
    Template("all_gather", cuda_ranks.all_gather, lambda c, s: (s.programs,)),
    Template("share_ids", cuda_ranks.share_ids, lambda c, s: (1,)),
    Template("send_ids", cuda_ranks.send_ids, lambda c, s: (1,)),
    Template("place_sent", cuda_ranks.place_sent, lambda c, s: (1,)),
    Template("send", cuda_ranks.send, lambda c, s: (CROSSING_PROGRAMS,)),
    Template("receive", cuda_ranks.receive, lambda c, s: (CROSSING_PROGRAMS,)),
    Template("advance", cuda_rows.advance, lambda c, s: (1,)),
    Template("place", cuda_rows.place, lambda c, s: (1,)),
    Template(
        "attention_decode",
        cuda_attention.attention_decode,
        lambda c, s: (s.sequences, c["HKV"], s.splits),
    ),
    Template(
        "attention_reduce",
        cuda_attention.attention_reduce,
        lambda c, s: (s.sequences, c["HQ"], _cover(c, "D", "BLOCK_D")),
    ),
    Template("kv_write", cuda_attention.kv_write, lambda c, s: (s.tokens,)),
    Template("attention_prefill", cuda_attention.attention_prefill, _prefill),
    Template("attention_prefill_hopper", attention_prefill_hopper, _tiles),
)
TEMPLATES = {template.name: template for template in _ALL}
# Templates that a builder takes instead of its own when the tile says so.
_VARIANTS = {"gemv_stream": "gemv", "skinny_ahead": "skinny"}


def instance(template: str, *operation: Any, **parameters: Any) -> KernelSource:
    """An instance of `template`: its operation (`Linear`, `Heads`) if it has one, then its tile.

    Raises CompileError for an unknown template, and for parameters that are missing, unknown or
    do not go together.
    """
    if template not in TEMPLATES:
        known = ", ".join(TEMPLATES)
        raise CompileError(f"no kernel template {template!r}", hint=f"one of: {known}")
    try:
        return TEMPLATES[template].build(*operation, **parameters)
    except TypeError as error:
        raise CompileError(str(error), where=template, hint="check shape and tile") from error


def grid(source: KernelSource, sizes: Sizes) -> Grid:
    """How many programs a launch of the instance takes for these sizes."""
    name = _VARIANTS.get(source.template, source.template)
    counts = TEMPLATES[name].grid(source.constants, sizes)
    x, y, z = (*counts, 1, 1)[:3]
    return x, y, z
