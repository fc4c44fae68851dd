"""Random batches for the CPU's attention kernel, with what it must compute."""

import dataclasses
import math

import torch
from cpu_checks import F32, Guarded
from torch import Tensor


@dataclasses.dataclass
class Attention:
    """A random batch: sequence i has context[i] cached tokens and new[i] new ones."""

    new: tuple[int, ...] = (1,)
    context: tuple[int, ...] = (0,)
    heads: tuple[int, int] = (9, 3)
    dim: int = 64
    v_dim: int = 0
    dtype: torch.dtype = F32
    kv_dtype: torch.dtype | None = None
    rope: int = 1
    rotary: int = 0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    poison: bool = True

    def build(self) -> None:
        torch.manual_seed(sum(self.new) + sum(self.context) + self.dim)
        self.v_dim = self.v_dim or self.dim
        self.rotary = self.rotary or self.dim
        self.kv_dtype = self.kv_dtype or self.dtype
        q_heads, kv_heads = self.heads
        tokens = sum(self.new)
        self.qkv = torch.randn(
            tokens, q_heads * self.dim + kv_heads * (self.dim + self.v_dim) + 3
        ).to(self.dtype)
        cut = [q_heads * self.dim, kv_heads * self.dim, kv_heads * self.v_dim, 3]
        q, k, v, _ = self.qkv.split(cut, dim=1)
        self.q, self.k = q.unflatten(1, (q_heads, -1)), k.unflatten(1, (kv_heads, -1))
        self.v = v.unflatten(1, (kv_heads, -1))
        angles = torch.rand(tokens, self.rotary // 2) * 6
        angles = angles.repeat(1, 2) if self.rope == 1 else angles.repeat_interleave(2, dim=1)
        self.cos, self.sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        self.sink = torch.randn(q_heads) if self.sinks else None
        pages = [-(-(c + n) // 16) for c, n in zip(self.context, self.new, strict=True)]
        self.num_pages = sum(pages) + 3
        self.k_size, self.v_size = kv_heads * self.dim * 16, kv_heads * self.v_dim * 16
        stride = max(self.k_size, self.v_size) + 8
        self.page_stride = stride
        self.k_cache = torch.full((self.num_pages, stride), math.nan).to(self.kv_dtype)
        self.v_cache = self.k_cache.clone()
        order = torch.randperm(self.num_pages).tolist()
        width = max(pages, default=0) + 2
        self.table = torch.full((len(pages), width), -7, dtype=torch.int32)
        self.past = []
        for s, count in enumerate(pages):
            self.table[s, :count] = torch.tensor([order.pop() for _ in range(count)])
            past_k = torch.randn(self.context[s], kv_heads, self.dim).to(self.kv_dtype)
            past_v = torch.randn(self.context[s], kv_heads, self.v_dim).to(self.kv_dtype)
            self.past.append((past_k, past_v))
            for t in range(self.context[s]):
                self.key_slot(s, t).copy_(past_k[t])
                self.value_slot(s, t).copy_(past_v[t])
        self.start = torch.tensor([0, *self.new]).cumsum(0).to(torch.int32)
        self.lengths = torch.tensor(self.context, dtype=torch.int32)

    def key_slot(self, seq: int, position: int) -> Tensor:
        page = self.k_cache[int(self.table[seq, position // 16]), : self.k_size]
        return page.view(self.heads[1], self.dim, 16)[:, :, position % 16]

    def value_slot(self, seq: int, position: int) -> Tensor:
        page = self.v_cache[int(self.table[seq, position // 16]), : self.v_size]
        return page.view(self.heads[1], 16, self.v_dim)[:, position % 16]

    def fields(self, out: Guarded) -> dict:
        q_heads, kv_heads = self.heads
        stride = self.qkv.shape[1]
        return dict(
            q=self.q, k=self.k, v=self.v, q_stride_token=stride, q_stride_head=self.dim,
            k_stride_token=stride, k_stride_head=self.dim, v_stride_token=stride,
            v_stride_head=self.v_dim, dtype=self.dtype, cos=self.cos if self.rope else None,
            sin=self.sin if self.rope else None, cos_stride=self.rotary, rotary_dim=self.rotary,
            rope_style=self.rope, k_cache=self.k_cache, v_cache=self.v_cache,
            kv_dtype=self.kv_dtype, page_tokens=16, page_stride=self.page_stride,
            num_pages=self.num_pages, block_table=self.table,
            block_table_stride=self.table.shape[1], query_start=self.start,
            context_len=self.lengths, seqs=len(self.new), tokens=sum(self.new), q_heads=q_heads,
            kv_heads=kv_heads, head_dim=self.dim, v_head_dim=self.v_dim,
            scale=1 / math.sqrt(self.dim), softcap=self.softcap, window=self.window,
            sinks=self.sink, out=out.out, out_stride=out.stride,
        )  # fmt: skip

    def rotated(self, x: Tensor) -> Tensor:
        if not self.rope:
            return x.double()
        x, rest = x.double().split([self.rotary, x.shape[-1] - self.rotary], dim=-1)
        cos, sin = self.cos.double()[:, None], self.sin.double()[:, None]
        if self.rope == 1:
            low, high = x.chunk(2, dim=-1)
            other = torch.cat([-high, low], dim=-1)
        else:
            other = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        return torch.cat([x * cos + other * sin, rest], dim=-1)

    def reference(self) -> tuple[Tensor, list[Tensor]]:
        """The output [tokens, q_heads * v_dim] in float64, and all keys of each sequence."""
        group = self.heads[0] // self.heads[1]
        outs, all_keys = [], []
        q, k = self.rotated(self.q), self.rotated(self.k).to(self.kv_dtype)
        for s, (past_k, past_v) in enumerate(self.past):
            rows = slice(int(self.start[s]), int(self.start[s + 1]))
            keys = torch.cat([past_k, k[rows]]).double()
            values = torch.cat([past_v, self.v[rows].to(self.kv_dtype)]).double()
            all_keys.append(keys)
            score = torch.einsum("qhd,khd->hqk", q[rows], keys.repeat_interleave(group, 1))
            score = score / math.sqrt(self.dim)
            if self.softcap:
                score = self.softcap * torch.tanh(score / self.softcap)
            i = torch.arange(self.new[s])[:, None] + self.context[s]
            j = torch.arange(len(keys))
            seen = j <= i
            if self.window:
                seen &= j > i - self.window
            score = score.masked_fill(~seen, -math.inf)
            if self.sink is not None:
                sink = self.sink.double()[:, None, None].expand(-1, score.shape[1], 1)
                score = torch.cat([score, sink], dim=2)
            weight = score.softmax(-1)[..., : len(keys)]
            out = torch.einsum("hqk,khd->qhd", weight, values.repeat_interleave(group, 1))
            outs.append(out.flatten(1))
        return torch.cat(outs), all_keys
