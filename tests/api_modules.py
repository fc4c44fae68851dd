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
        self.kinds = nn.Embedding(20, width)
        self.register_buffer("kind", torch.zeros(1, 40, dtype=torch.long))
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
        x = x + self.kinds(self.get_buffer("kind")[:, :count].expand(batch, count))
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


class RmsNorm(nn.Module):
    """Root mean square norm by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.2 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain


class LayerNorm(nn.Module):
    """Layer norm by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.bias = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        spread = centred.pow(2).mean(-1, keepdim=True)
        return centred / torch.sqrt(spread + 1e-5) * self.gain + self.bias


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of halves."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class GroupedAttention(nn.Module):
    """Rope inside, two KV heads repeated for four query heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = 4, 2, width // 4
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width // 2, bias=False)
        self.wv = nn.Linear(width, width // 2, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        steps = torch.arange(0, self.dim, 2).float() / self.dim
        angles = torch.arange(tokens).float()[:, None] * 10000.0**-steps
        cos, sin = (
            torch.cat((f(angles), f(angles)), -1)[None, None] for f in (torch.cos, torch.sin)
        )
        q = self.wq(x).view(batch, tokens, self.heads, self.dim).transpose(1, 2)
        k = self.wk(x).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        v = self.wv(x).view(batch, tokens, self.kv_heads, self.dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(seen.transpose(1, 2).contiguous().view(batch, tokens, width))


class GroupedBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.norms = GroupedAttention(width), nn.ModuleList()
        self.norms.extend([RmsNorm(width), RmsNorm(width)])
        self.w1, self.w3 = (nn.Linear(width, 96, bias=False) for _ in range(2))
        self.w2 = nn.Linear(96, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        y = self.norms[1](x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class RopeDecoder(nn.Module):
    """Rope, RMS norm, grouped heads, gated MLP, tied head; no bound on its context."""

    def __init__(self, width: int = 64, vocabulary: int = 101) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(GroupedBlock(width) for _ in range(2))
        self.norm = RmsNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)


class LearnedBlock(nn.Module):
    """Heads of one projection, an explicit mask, and layer norm by hand."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.before, self.after = LayerNorm(width), LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 80), nn.Linear(80, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = (
            self.qkv(self.before(x)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        )
        place = torch.arange(tokens, device=x.device)
        mask = place[:, None] >= place[None]
        if self.window:
            mask = mask & (place[:, None] - place[None] < self.window)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class LearnedDecoder(nn.Module):
    """Positions learned in a table of 96, a window in the second layer, a head of its own."""

    def __init__(self, width: int = 48, vocabulary: int = 67) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(LearnedBlock(width, window) for window in (0, 9))
        self.norm = LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, None]:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)), None


class BufferDecoder(nn.Module):
    """Everything sliced from buffers: a float mask, rope tables and a parameter of positions.

    Keys and values are shared by all heads, by unsqueeze and expand.
    """

    def __init__(self, width: int = 32, vocabulary: int = 40, most: int = 64) -> None:
        super().__init__()
        self.dim = width // 4
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.3 * torch.randn(1, most, width))
        hidden = torch.full((most, most), float("-inf")).triu(1)
        self.register_buffer("mask", hidden[None, None], persistent=False)
        angles = torch.arange(most)[:, None] * 100.0 ** -torch.linspace(0, 1, self.dim // 2)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin())
        self.norm = nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * self.dim)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        batch, tokens = ids.shape
        assert tokens <= 64
        x = self.words(ids) + self.places[:, :tokens]
        cos, sin = self.get_buffer("cos")[:tokens], self.get_buffer("sin")[:tokens]
        y = self.norm(x)
        q = self.q(y).view(batch, tokens, 4, self.dim)
        k, v = self.kv(y).view(batch, tokens, 1, 2 * self.dim).split(self.dim, -1)
        q = rotate(q, cos[:, None], sin[:, None]).transpose(1, 2)
        k = rotate(k, cos[:, None], sin[:, None]).transpose(1, 2)
        k = k[:, :, None].expand(-1, -1, 4, -1, -1).reshape(batch, 4, tokens, self.dim)
        v = v.transpose(1, 2)[:, :, None].expand(-1, -1, 4, -1, -1).reshape(k.shape)
        mask = self.get_buffer("mask")[:, :, :tokens, :tokens]
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
        x = x + seen.transpose(1, 2).flatten(2)
        return {"logits": self.head(self.norm(x))}
