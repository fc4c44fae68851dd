"""What the attention kernels are checked with; see kernel_checks.py.

Pages are scattered and hold NaN wherever no token was written, so that a kernel that reads past the
end of a sequence is found out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sitsc.codegen.cuda_attention import Heads
from sitsc.codegen.cuda_templates import Sizes, instance
from sitsc.codegen.triton_source import KernelSource
from sitsc.core.ops.attention import attend
from sitsc.core.ops.rope import rope_reference
from tests.kernel_checks import BF16, TYPES, Check, Inputs, Prepared, Tile, launch


@dataclass(frozen=True)
class Pool:
    """Pages of one layer and the block tables of the sequences; page 0 belongs to nobody."""

    kv: Tensor
    table: Tensor
    op: Heads

    @classmethod
    def make(cls, make: Inputs, op: Heads, lengths: list[int], room: list[int]) -> "Pool":
        """Sequences of `lengths` old tokens (below zero: idle) with pages for `room` more each."""
        wanted = [max(old, 0) + more for old, more in zip(lengths, room, strict=True)]
        counts = [-(-tokens // op.page_tokens) for tokens in wanted]
        pages = sum(counts) + 3
        order = torch.randperm(pages - 1, generator=make.generator, device=make.device) + 1
        starts = [sum(counts[:i]) for i in range(len(counts))]
        table = make.zeros(len(counts), max(counts) + 1)
        kv = make.poison(pages, 2, op.kv_heads, op.page_tokens, op.head_dim)
        pool = cls(kv, table, op)
        for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
            table[sequence, :count] = order[start : start + count]
            old = make.normal(2, max(lengths[sequence], 0), op.kv_heads, op.head_dim)
            pool.write(sequence, 0, old[0], old[1])
        return pool

    def _places(self, sequence: int, first: int, count: int) -> tuple[Tensor, Tensor]:
        token = torch.arange(first, first + count, device=self.kv.device)
        page = self.table[sequence].long()[token // self.op.page_tokens]
        return page, token % self.op.page_tokens

    def write(self, sequence: int, first: int, k: Tensor, v: Tensor) -> None:
        """k and v [tokens, kv_heads, dim] from token `first` on."""
        page, slot = self._places(sequence, first, len(k))
        self.kv[page, 0, :, slot], self.kv[page, 1, :, slot] = k, v

    def read(self, sequence: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V [kv_heads, count, dim]."""
        page, slot = self._places(sequence, 0, count)
        return self.kv[page, 0, :, slot].transpose(0, 1), self.kv[page, 1, :, slot].transpose(0, 1)

    def copy(self) -> "Pool":
        """The same pages in other memory."""
        return Pool(self.kv.clone(), self.table, self.op)


@dataclass(frozen=True)
class Rows:
    """Packed rows [q | k | v] of a step with their angles, and q, k, v as attention needs them."""

    op: Heads
    row: Tensor
    cos: Tensor
    sin: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor

    @classmethod
    def make(cls, make: Inputs, op: Heads, positions: list[int]) -> "Rows":
        row, dim = make.normal(len(positions), op.row), max(op.rotated, 2)
        half = torch.arange(dim // 2, device=make.device, dtype=torch.float32)
        angle = make.table(positions, torch.float32)[:, None] * 10000.0 ** (-2 * half / dim)
        twice = angle.repeat_interleave(2, -1) if op.rope == "interleaved" else angle.repeat(1, 2)
        cos, sin = twice.cos().to(TYPES[op.angle_dtype]), twice.sin().to(TYPES[op.angle_dtype])
        sizes = [count * op.head_dim for count in (op.heads, op.kv_heads, op.kv_heads)]
        q, k, v = (part.unflatten(-1, (-1, op.head_dim)) for part in row.split(sizes, -1))

        def turned(x: Tensor) -> Tensor:
            """Rotated in fp32 and rounded once, in memory of its own."""
            if op.rope == "none":
                return x.clone()
            wide = rope_reference(x.float(), cos.float()[:, None], sin.float()[:, None], op.rope)
            return wide.to(BF16)

        sinks = make.normal(op.heads, dtype=torch.float32)
        return cls(op, row, cos, sin, turned(q), turned(k), v.clone(), sinks)

    def arguments(self) -> dict[str, Any]:
        """Values of the kernels' arguments."""
        values: dict[str, Any] = {"row_ptr": self.row, "cos_ptr": self.cos, "sin_ptr": self.sin}
        return values | {"sinks_ptr": self.sinks}

    def answer(self, pool: Pool, sequence: int, part: slice, first: int) -> Tensor:
        """Write tokens `part` of a sequence from position `first` on, and attend; [tokens, .]."""
        pool.write(sequence, first, self.k[part], self.v[part])
        q, op = self.q[part], self.op
        k, v = pool.read(sequence, first + len(q))
        sinks = self.sinks if op.sinks else None
        out = attend(q.transpose(0, 1), k, v, first, op.scale, op.window, op.softcap, sinks)
        return out.flatten(1).to(BF16)


@dataclass(frozen=True)
class DecodeCheck:
    """One new token a sequence; `merge` "last" or "reduce" with several splits."""

    op: Heads
    lengths: tuple[int, ...]
    tile: Tile
    splits: int = 1
    merge: str = "none"
    share: int = 1
    block_d: int = 32

    def sources(self, pdl: bool) -> list[KernelSource]:
        more: dict[str, Any] = {"share": self.share, "max_splits": self.splits, "pdl": pdl}
        found = [instance("attention_decode", self.op, merge=self.merge, **(more | self.tile))]
        if self.merge == "reduce":
            more |= {"block": self.tile["block"], "block_d": self.block_d}
            found.append(instance("attention_reduce", self.op, **more))
        return found

    def prepare(self, device: str, pdl: bool) -> Prepared:
        make, op, count = Inputs(device), self.op, len(self.lengths)
        pool = Pool.make(make, op, list(self.lengths), [1] * count)
        rows = Rows.make(make, op, list(self.lengths))
        context = make.table(self.lengths, torch.int32)
        out = make.poison(count, op.heads * op.head_dim)
        shape = (count, op.heads, self.splits)
        counter = make.zeros(count * op.kv_heads)
        values = rows.arguments() | {"kv_ptr": pool.kv, "block_table_ptr": pool.table}
        values |= {"context_lens_ptr": context, "out_ptr": out, "num_splits": self.splits}
        size = count * op.heads * self.splits * (op.head_dim + 1)  # sums, then weights
        values |= {"partial_ptr": make.poison(size, dtype=torch.float32), "counter_ptr": counter}
        values |= {"weight_ptr": make.poison(*shape, dtype=torch.float32)}
        values |= {"table_width": pool.table.shape[1]}
        after, want = pool.copy(), out.clone()
        for sequence, length in enumerate(self.lengths):
            if length >= 0:
                part = slice(sequence, sequence + 1)
                want[part] = rows.answer(after, sequence, part, length)
        sizes = Sizes(tokens=count, sequences=count, splits=self.splits)
        steps = tuple(launch(source, sizes, values) for source in self.sources(pdl))
        answer = Check("out", out, want, 1e-2, context >= 0)
        return Prepared(steps, (answer, Check("kv", pool.kv, after.kv, 2e-3)), (counter,))


@dataclass(frozen=True)
class RaggedCheck:
    """kv_write, then attention_prefill over (old, new) tokens a sequence; idle tokens behind.

    q is rotated in place, or goes to a buffer of its own. `template` attends instead, with
    `programs` of them (0: one a tile).
    """

    op: Heads
    sequences: tuple[tuple[int, int], ...]
    tile: Tile
    padding: int = 0
    in_place: bool = True
    max_sequences: int = 256
    template: str = "attention_prefill"
    programs: int = 0

    @property
    def _q_row(self) -> int:
        return 0 if self.in_place else self.op.heads * self.op.head_dim

    def sources(self, pdl: bool) -> list[KernelSource]:
        common = {"q_row": self._q_row, "max_sequences": self.max_sequences, "pdl": pdl}
        return [
            instance("kv_write", self.op, **common),
            instance(self.template, self.op, **(common | self.tile)),
        ]

    def prepare(self, device: str, pdl: bool) -> Prepared:
        make, op = Inputs(device), self.op
        olds, news = [old for old, _ in self.sequences], [new for _, new in self.sequences]
        pool, tokens = Pool.make(make, op, olds, news), sum(news) + self.padding
        positions = [old + i for old, new in self.sequences for i in range(new)]
        rows = Rows.make(make, op, positions + [0] * self.padding)
        q_out = rows.row if self.in_place else make.poison(tokens, self._q_row)
        starts = [sum(news[:i]) for i in range(len(news) + 1)]
        out = make.poison(tokens, op.heads * op.head_dim)
        values = rows.arguments() | {"kv_ptr": pool.kv, "block_table_ptr": pool.table}
        values |= {"q_out_ptr": q_out, "q_ptr": q_out, "out_ptr": out}
        values |= {"query_start_ptr": make.table(starts, torch.int32)}
        values |= {"context_lens_ptr": make.table(olds, torch.int32)}
        values |= {"num_sequences": len(news), "table_width": pool.table.shape[1]}
        counter = make.zeros(1)
        values |= {"q_map": q_out.view(tokens, -1, op.head_dim), "counter_ptr": counter}
        values |= {"kv_map": pool.kv.view(-1, op.head_dim)}
        after, want = pool.copy(), out.clone()
        for sequence, (old, new) in enumerate(self.sequences):
            if new:
                part = slice(starts[sequence], starts[sequence] + new)
                want[part] = rows.answer(after, sequence, part, old)
        sizes = Sizes(tokens=tokens, sequences=len(news), programs=self.programs)
        steps = tuple(launch(source, sizes, values) for source in self.sources(pdl))
        checks = (Check("out", out, want, 1e-2), Check("kv", pool.kv, after.kv, 2e-3))
        return Prepared(steps, checks, (counter,))
