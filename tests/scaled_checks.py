"""A residual sum that its kernel scales for the norm after it, and the layer that reads it."""

from dataclasses import dataclass, field, replace

import torch

from sitsc.codegen import cuda_linear
from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.cuda_templates import Sizes, grid, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.ops.linear import fused_linear_reference
from tests.kernel_checks import BF16, NAMES, TYPES, Check, Inputs, Prepared, Tile, launch


@dataclass(frozen=True)
class ScaledGatherCheck:
    """An embedding scaled for the norm of the first layer, with `count` sums of squares a row."""

    rows: int
    columns: int
    count: int
    scale: float = 1.0
    offset: float = 0.0
    out_dtype: str = "fp32"
    tile: Tile = field(default_factory=dict)

    def sources(self, pdl: bool) -> list[KernelSource]:
        shape = {"columns": self.columns, "scale": self.scale, "out_dtype": self.out_dtype}
        shape |= {"scaled": self.count, "offset": self.offset}
        return [instance("gather", pdl=pdl, **shape, **self.tile)]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make = self.sources(pdl), Inputs(device)
        table, gain = make.normal(100, self.columns), 1 + make.normal(self.columns, scale=0.1)
        ids, kind = make.integers(100, self.rows), TYPES[self.out_dtype]
        rows = make.poison(self.rows, self.columns)
        y = make.poison(self.rows, self.columns, dtype=kind)
        squares = make.poison(self.rows, self.count, dtype=torch.float32)
        want = (table[ids].float() * self.scale).to(kind)
        values = {"table_ptr": table, "ids_ptr": ids, "y_ptr": y, "norm_ptr": gain}
        values |= {"scaled_ptr": rows, "squares_ptr": squares}
        step = launch(source, Sizes(tokens=self.rows), values)
        scaled = (want.float() * (self.offset + gain.float())).to(BF16)
        checks = (
            Check("y", y, want),
            Check("scaled", rows, scaled, 4e-3),
            Check("squares", squares.t(), want.float().square().sum(1), 1e-4, parts=True),
        )
        return Prepared((step,), checks)


@dataclass(frozen=True)
class ScaledCheck:
    """`first` is a residual layer, `second` has a norm; kernels and tiles as for `instance`.

    `in_place` writes the sum over the residual.
    """

    first: Linear
    second: Linear
    tokens: int
    tile: Tile
    second_tile: Tile
    templates: tuple[str, str] = ("skinny", "skinny")
    programs: int = 0
    in_place: bool = False

    def sources(self, pdl: bool) -> list[KernelSource]:
        tiles = (self.tile, self.second_tile)
        tiles = tuple(
            tile | ({} if template == "skinny" else {"tokens": self.tokens})
            for template, tile in zip(self.templates, tiles, strict=True)
        )
        plain = instance(self.templates[0], self.first, pdl=pdl, **tiles[0])
        count = grid(plain, Sizes(programs=self.programs))[0]
        scaled = replace(self.first, scaled=count, next_offset=self.second.offset)
        reader = replace(self.second, norm=False, x_dtype="bf16", squares=count)
        made = zip(self.templates, (scaled, reader), tiles, strict=True)
        return [instance(template, op, pdl=pdl, **tile) for template, op, tile in made]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (one, two), make = self.sources(pdl), Inputs(device)
        a, b, wide = self.first, self.second, torch.float32
        x = make.normal(self.tokens, a.columns)
        residual = make.normal(self.tokens, a.rows, dtype=TYPES[a.out_dtype])
        weight = make.normal(a.rows, a.columns, scale=a.columns**-0.5)
        more = make.normal(b.rows * b.sides, b.columns, scale=b.columns**-0.5)
        gain = 1 + make.normal(a.rows, scale=0.1)
        shown = ("none", 0.0, 0.0, "residual", "silu", NAMES[a.out_dtype], "plain")
        total = fused_linear_reference(x, weight, None, None, None, residual, a.rows, *shown)
        after = ("rms_norm", b.eps, b.offset, {"store": "none"}.get(b.epilogue, b.epilogue))
        after = (*after, b.activation, NAMES[b.out_dtype], "plain")
        want = fused_linear_reference(total, more, None, None, gain, None, b.rows, *after)
        y = make.poison(self.tokens, a.rows, dtype=TYPES[a.out_dtype])
        y, count = residual if self.in_place else y, grid(one, Sizes(programs=self.programs))[0]
        rows = make.poison(self.tokens, a.rows)
        squares = make.poison(self.tokens, count, dtype=wide)
        out = make.poison(self.tokens, b.rows, dtype=TYPES[b.out_dtype])
        values = {"x_ptr": x, "w_ptr": weight, "residual_ptr": residual, "y_ptr": y}
        values |= {"next_norm_ptr": gain, "scaled_ptr": rows, "scaled_squares_ptr": squares}
        first = launch(one, Sizes(programs=self.programs), values | {"num_tokens": self.tokens})
        sums, counters = cuda_linear.workspace(b, two, self.tokens)
        counter = make.zeros(counters)
        values = {"x_ptr": rows, "squares_ptr": squares, "w_ptr": more, "y_ptr": out}
        values |= {"partial_ptr": make.poison(sums, dtype=wide), "counter_ptr": counter}
        second = launch(two, Sizes(), values | {"num_tokens": self.tokens})
        scaled = (total.float() * (b.offset + gain.float())).to(BF16)
        checks = (
            Check("sum", y, total, 8e-3),
            Check("scaled", rows, scaled, 1e-2),
            Check("squares", squares.t(), total.float().square().sum(1), 8e-3, parts=True),
            Check("y", out, want, 1e-2),
        )
        return Prepared((first, second), checks, (counter,))
