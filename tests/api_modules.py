"""Modules written by hand for the tests of the Python API; none of them comes from transformers."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Encoder(nn.Module):
    """A bidirectional encoder with padding, a pooled vector, and a head of three values."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(60, width)
        self.places = nn.Parameter(torch.randn(1, 40, width))
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gain = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.gate = nn.Linear(width, 64, bias=False)
        self.up = nn.Linear(width, 64, bias=False)
        self.down = nn.Linear(64, width, bias=False)
        self.head = nn.Linear(width, 3)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor | None]:
        batch, count = ids.shape
        x = self.words(ids) + self.places[:, :count]
        shape = (batch, count, 3, self.heads, x.shape[-1] // self.heads)
        q, k, v = self.qkv(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        x = x + self.out(seen.transpose(1, 2).reshape(batch, count, -1))
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        x = x + self.down(F.silu(self.gate(scaled)) * self.up(scaled))
        kept = mask[..., None].float()
        pooled = (x * kept).sum(1) / kept.sum(1)
        return {"hidden": x, "scores": self.head(pooled) / self.temperature, "nothing": None}


class Pair(nn.Module):
    """Two results, from a transposed tensor that a linear layer reads and a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.mix = nn.Linear(12, 24)
        self.back = nn.Linear(16, 20, bias=False)
        self.back.weight = self.table.weight

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, None]:
        turned = F.silu(x.transpose(1, 2).contiguous())
        return self.mix(turned), self.back(self.table(ids)), None
