"""What CUDA kernels are checked with: launches over fresh inputs, and what they must leave.

Used at tiny shapes in Triton's interpreter and at real ones on a GPU. References are those of the
operators, in fp32 from the same bfloat16 inputs. Attention: attention_checks.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from sitsc.codegen import cuda_linear
from sitsc.codegen.cuda_linear import Linear
from sitsc.codegen.cuda_templates import Sizes, grid, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.ops.linear import fused_linear_reference
from sitsc.core.ops.norm import glu_reference, rms_norm_reference
from sitsc.core.ops.rope_table import rope_table_reference

BF16 = torch.bfloat16
TYPES = {"bf16": BF16, "fp32": torch.float32}
NAMES = {"bf16": "bfloat16", "fp32": "float32"}
Tile = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One launch."""

    source: KernelSource
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Check:
    """`got` must equal `want`: exactly, or within `tolerance` of its norm; in all rows or some.

    With `parts`, `got` is a stack of sums and all of them together are checked.
    """

    name: str
    got: Tensor
    want: Tensor
    tolerance: float = 0.0
    rows: Tensor | None = None
    parts: bool = False

    def error(self) -> float:
        """0 for equal, NaN in the same places; otherwise the relative error of the norm."""
        got, want = self.got.double().sum(0) if self.parts else self.got, self.want
        if self.rows is not None:
            got, want = got[self.rows], want[self.rows]
        got, want = got.double(), want.double()
        if not torch.equal(got.isnan(), want.isnan()):
            return float("inf")
        got, want = got.nan_to_num(0.0), want.nan_to_num(0.0)
        difference = (got - want).norm().item()
        return difference / max(want.norm().item(), 1e-30) if difference else 0.0

    def passes(self) -> bool:
        return self.error() <= self.tolerance


@dataclass(frozen=True)
class Prepared:
    """Launches in order, and the checks after them; `zero` must be zero again."""

    steps: tuple[Step, ...]
    checks: tuple[Check, ...]
    zero: tuple[Tensor, ...] = ()


class KernelCheck(Protocol):
    """A kernel, or a few that follow each other, and how they are checked."""

    def sources(self, pdl: bool) -> list[KernelSource]:
        """The kernels, in the order of their launches."""
        ...

    def prepare(self, device: str, pdl: bool) -> Prepared:
        """Inputs on the device, the launches and the checks."""
        ...


class Inputs:
    """Random inputs, the same on every run of one device."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> Tensor:
        wide = torch.empty(shape, device=self.device, dtype=dtype)
        return wide.normal_(generator=self.generator).mul_(scale)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device, generator=self.generator)

    def poison(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.full(shape, float("nan"), device=self.device, dtype=dtype)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=dtype)

    def table(self, values: Sequence[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, device=self.device, dtype=dtype)


def launch(source: KernelSource, sizes: Sizes, values: dict[str, Any]) -> Step:
    """The launch of a kernel with its arguments taken by name."""
    return Step(source, grid(source, sizes), tuple(values[name] for name, _ in source.arguments))


@dataclass(frozen=True)
class LinearCheck:
    """A kernel of the linear family; `in_place` writes y over the residual."""

    template: str
    op: Linear
    tokens: int
    tile: Tile
    programs: int = 0
    in_place: bool = False

    def sources(self, pdl: bool) -> list[KernelSource]:
        tokens = {} if self.template == "skinny" else {"tokens": self.tokens}
        return [instance(self.template, self.op, pdl=pdl, **(self.tile | tokens))]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make, op = self.sources(pdl), Inputs(device), self.op
        x = make.normal(self.tokens, op.columns, dtype=TYPES[op.x_dtype])
        residual = make.normal(self.tokens, op.rows, dtype=TYPES[op.out_dtype])
        weight = make.normal(op.rows * op.sides, op.columns, scale=op.columns**-0.5)
        norm, bias = 1 + make.normal(op.columns, scale=0.1), make.normal(op.rows * op.sides)
        want = fused_linear_reference(
            x,
            weight,
            None,
            bias if op.bias else None,
            norm if op.norm else None,
            residual if op.epilogue == "residual" else None,
            op.rows,
            "rms_norm" if op.norm else "none",
            op.eps,
            op.offset,
            op.epilogue,
            op.activation,
            NAMES[op.out_dtype],
            "plain",
        )
        fresh = make.poison(self.tokens, op.rows, dtype=TYPES[op.out_dtype])
        y = residual if self.in_place else fresh
        sums, counters = cuda_linear.workspace(op, source, self.tokens)
        counter = make.zeros(counters)
        values = {"x_ptr": x, "norm_ptr": norm, "w_ptr": weight, "bias_ptr": bias, "y_ptr": y}
        values |= {"residual_ptr": residual, "num_tokens": self.tokens, "counter_ptr": counter}
        values |= {"partial_ptr": make.poison(sums, dtype=torch.float32)}
        step = launch(source, Sizes(programs=self.programs), values)
        return Prepared((step,), (Check("y", y, want, 8e-3),), (counter,))


@dataclass(frozen=True)
class RmsNormCheck:
    rows: int
    columns: int
    parts: int = 0
    offset: float = 0.0
    weight: bool = True
    x_dtype: str = "bf16"
    parts_dtype: str = "fp32"
    tile: Tile = field(default_factory=dict)

    def sources(self, pdl: bool) -> list[KernelSource]:
        shape = {"columns": self.columns, "eps": 1e-5, "offset": self.offset}
        shape |= {"x_dtype": self.x_dtype, "parts_dtype": self.parts_dtype}
        shape |= {"weight": self.weight, "parts": self.parts}
        return [instance("rms_norm", pdl=pdl, **(shape | self.tile))]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make = self.sources(pdl), Inputs(device)
        kind = TYPES[self.x_dtype]
        x = make.normal(self.rows, self.columns, dtype=kind)
        dtype = TYPES[self.parts_dtype]
        added = make.normal(self.parts, self.rows, self.columns, dtype=dtype)
        weight = 1 + make.normal(self.columns, scale=0.1)
        total, y = make.poison(*x.shape, dtype=kind), make.poison(*x.shape)
        values = {"x_ptr": x, "parts_ptr": added, "sum_ptr": total, "y_ptr": y}
        values |= {"norm_ptr": weight}
        summed = (x.float() + added.float().sum(0)).to(kind) if self.parts else x
        want = rms_norm_reference(summed, weight if self.weight else None, 1e-5, self.offset)
        want = want.to(BF16)
        checks = [Check("y", y, want, 4e-3)]
        checks += [Check("sum", total, summed, 8e-3)] if self.parts else []
        return Prepared((launch(source, Sizes(tokens=self.rows), values),), tuple(checks))


@dataclass(frozen=True)
class SpreadNormCheck:
    """A norm that several programs a row share, and the linear kernel that completes it."""

    op: Linear
    tokens: int
    tile: Tile
    blocks: int = 4
    parts: int = 0
    template: str = "skinny"

    def sources(self, pdl: bool) -> list[KernelSource]:
        op, types = self.op, {"x_dtype": self.op.x_dtype, "parts": self.parts}
        shape = {"columns": op.columns, "eps": op.eps, "offset": op.offset, "blocks": self.blocks}
        reader = replace(op, norm=False, x_dtype="bf16", squares=self.blocks)
        norm = instance("rms_norm", pdl=pdl, **shape, **types)
        return [norm, instance(self.template, reader, pdl=pdl, **self.tile)]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (norm, linear), make, op = self.sources(pdl), Inputs(device), self.op
        kind, wide = TYPES[op.x_dtype], torch.float32
        x, gain = make.normal(self.tokens, op.columns, dtype=kind), make.normal(op.columns)
        added = make.normal(self.parts, self.tokens, op.columns, dtype=wide)
        weight = make.normal(op.rows * op.sides, op.columns, scale=op.columns**-0.5)
        summed = (x.float() + added.sum(0)).to(kind) if self.parts else x
        epilogue = "none" if op.epilogue == "parts" else op.epilogue
        more = (op.rows, "rms_norm", op.eps, op.offset, epilogue, op.activation, "float32")
        want = fused_linear_reference(summed, weight, None, None, gain, None, *more, "plain")
        split = int(linear.constants["SPLIT"]) if op.epilogue == "parts" else 1
        y = make.poison(split, self.tokens, op.rows, dtype=TYPES[op.out_dtype])
        normed, squares = make.poison(*x.shape), make.poison(self.tokens, self.blocks, dtype=wide)
        values = {"x_ptr": x, "parts_ptr": added, "sum_ptr": x, "norm_ptr": gain, "y_ptr": normed}
        first = launch(norm, Sizes(tokens=self.tokens), values | {"squares_ptr": squares})
        sums, counters = cuda_linear.workspace(op, linear, self.tokens)
        counter, partial = make.zeros(counters), make.poison(sums, dtype=wide)
        values = {"x_ptr": normed, "squares_ptr": squares, "w_ptr": weight, "parts_ptr": y}
        values |= {"y_ptr": y[0], "partial_ptr": partial, "counter_ptr": counter}
        second = launch(linear, Sizes(), values | {"num_tokens": self.tokens})
        checks = [Check("y", y, want, 1e-2, parts=True)]
        checks += [Check("sum", x, summed, 8e-3)] if self.parts else []
        return Prepared((first, second), tuple(checks), (counter,))


@dataclass(frozen=True)
class GatherCheck:
    rows: int
    table_rows: int
    columns: int
    scale: float = 1.0
    tile: Tile = field(default_factory=dict)

    def sources(self, pdl: bool) -> list[KernelSource]:
        return [instance("gather", columns=self.columns, scale=self.scale, pdl=pdl, **self.tile)]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make = self.sources(pdl), Inputs(device)
        table = make.normal(self.table_rows, self.columns)
        ids, y = make.integers(self.table_rows, self.rows), make.poison(self.rows, self.columns)
        want = (table[ids].float() * self.scale).to(BF16)
        values = {"table_ptr": table, "ids_ptr": ids, "y_ptr": y}
        step = launch(source, Sizes(tokens=self.rows), values)
        return Prepared((step,), (Check("y", y, want),))


@dataclass(frozen=True)
class RopeTableCheck:
    positions: tuple[int, ...]
    rotary_dim: int
    style: str = "half"
    scale: float = 1.0
    out_dtype: str = "bf16"

    def sources(self, pdl: bool) -> list[KernelSource]:
        shape = {"rotary_dim": self.rotary_dim, "style": self.style, "scale": self.scale}
        return [instance("rope_table", out_dtype=self.out_dtype, pdl=pdl, **shape)]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make, count = self.sources(pdl), Inputs(device), len(self.positions)
        ids = make.table(self.positions, torch.int64)
        half = torch.arange(self.rotary_dim // 2, device=device, dtype=torch.float32)
        inv_freq = 500000.0 ** (-2 * half / self.rotary_dim)
        out = make.poison(2, count, self.rotary_dim, dtype=TYPES[self.out_dtype])
        want = rope_table_reference(ids, inv_freq, self.scale, NAMES[self.out_dtype])
        if self.style == "interleaved":
            want = want[..., : self.rotary_dim // 2].repeat_interleave(2, -1)
        values = {"position_ids_ptr": ids, "inv_freq_ptr": inv_freq, "num_tokens": count}
        values |= {"cos_ptr": out[0], "sin_ptr": out[1]}
        tolerance = 2e-3 if self.out_dtype == "bf16" else 1e-5
        step = launch(source, Sizes(tokens=count), values)
        return Prepared((step,), (Check("cos, sin", out, want, tolerance),))


@dataclass(frozen=True)
class GluCheck:
    tokens: int
    columns: int
    activation: str = "silu"
    tile: Tile = field(default_factory=dict)

    def sources(self, pdl: bool) -> list[KernelSource]:
        shape = {"columns": self.columns, "activation": self.activation}
        return [instance("glu", pdl=pdl, **(shape | self.tile))]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make = self.sources(pdl), Inputs(device)
        x, y = make.normal(self.tokens, 2 * self.columns), make.poison(self.tokens, self.columns)
        gate, up = x.float().chunk(2, -1)
        want = glu_reference(gate, up, self.activation).to(BF16)
        step = launch(source, Sizes(tokens=self.tokens), {"x_ptr": x, "y_ptr": y})
        return Prepared((step,), (Check("y", y, want, 4e-3),))


@dataclass(frozen=True)
class AdvanceCheck:
    """Negative lengths are idle rows."""

    lengths: tuple[int, ...]
    max_sequences: int = 256

    def sources(self, pdl: bool) -> list[KernelSource]:
        return [instance("advance", max_sequences=self.max_sequences, pdl=pdl)]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make, count = self.sources(pdl), Inputs(device), len(self.lengths)
        ids, tokens, positions = (make.integers(1000, count) for _ in range(3))
        context = make.table(self.lengths, torch.int32)
        busy = context >= 0
        want = [torch.where(busy, ids, tokens), positions + busy, context + busy]
        values = {"ids_ptr": ids, "token_ids_ptr": tokens, "position_ids_ptr": positions}
        values |= {"context_lens_ptr": context, "num_sequences": count}
        got = (tokens, positions, context)
        pairs = zip(("tokens", "positions", "lengths"), got, want, strict=True)
        step = launch(source, Sizes(sequences=count), values)
        return Prepared((step,), tuple(Check(*each) for each in pairs))


@dataclass(frozen=True)
class PlaceCheck:
    """Some tokens come from ids of an earlier step, from any row to any place."""

    count: int
    tokens: int

    def sources(self, pdl: bool) -> list[KernelSource]:
        return [instance("place", pdl=pdl)]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        (source,), make = self.sources(pdl), Inputs(device)
        ids, tokens = make.integers(1000, self.count + 3), make.integers(1000, self.tokens)
        sources = (torch.arange(self.count, device=device) * 7 + 2) % (self.count + 3)
        places = self.tokens - 1 - 2 * torch.arange(self.count, device=device)
        want = tokens.clone()
        want[places] = ids[sources]
        values = {"ids_ptr": ids, "token_ids_ptr": tokens, "num_sequences": self.count}
        values |= {"token_sources_ptr": sources.int(), "token_places_ptr": places.int()}
        step = launch(source, Sizes(sequences=self.count), values)
        return Prepared((step,), (Check("tokens", tokens, want),))
