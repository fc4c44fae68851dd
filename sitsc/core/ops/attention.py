"""sitsc::attention (as traced) and sitsc::paged_attention (as executed over a paged KV pool).

Pool of one KV group: [pages, layers, 2, kv_heads, head_dim * page_tokens]; a K page keeps
[head_dim, page_tokens] per head (keys side by side in the fastest dimension), a V page
[page_tokens, head_dim]. Values may be narrower than keys: their page then uses the first part of
its room. Sizes are elements, positions count from the start of the sequence.
"""

import torch
from torch import Tensor

from sitsc.core.ops.rope import rope_reference


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention in fp32: q [heads, new, dim] from `first` on, k, v [kv_heads, all, dim].

    Key j is visible from i when j <= i and, with a window, j > i - window. Out [new, heads, dim].
    """
    groups = q.shape[0] // k.shape[0]
    k, v = k.float().repeat_interleave(groups, 0), v.float().repeat_interleave(groups, 0)
    scores = (q.float() @ k.transpose(-1, -2)) * scale
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    i = torch.arange(first, first + q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)[None]
    visible = j <= i if window <= 0 else (j <= i) & (j > i - window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.float().view(-1, 1, 1).expand(-1, q.shape[1], 1)
        weights = torch.cat((scores, extra), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v).transpose(0, 1)


@torch.library.custom_op("sitsc::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    """One sequence from its start: q, k, v [1, heads, tokens, dim]; out [1, tokens, heads, dim]."""
    out = attend(q[0], k[0], v[0], 0, scale, window, softcap, sinks)
    return out[None].to(q.dtype).contiguous()


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    window: int,
    softcap: float,
) -> Tensor:
    return q.new_empty((1, q.shape[2], q.shape[1], v.shape[3]))


def _write_page(kv: Tensor, k: Tensor, v: Tensor, page: int, slot: int) -> None:
    """k [kv_heads, dim], v [kv_heads, width] into a slot; kv [pages, 2, kv_heads, dim * page]."""
    heads, dim = k.shape
    kv[page, 0].view(heads, dim, -1)[:, :, slot] = k.to(kv.dtype)
    used = kv.shape[3] // dim * heads * v.shape[1]
    kv[page, 1].view(-1)[:used].view(heads, -1, v.shape[1])[:, slot] = v.to(kv.dtype)


def _gather(
    kv: Tensor, table: list[int], length: int, dim: int, width: int
) -> tuple[Tensor, Tensor]:
    """K [kv_heads, length, dim] and V [kv_heads, length, width] of a sequence from its pages."""
    heads, used = kv.shape[2], kv.shape[3] // dim * kv.shape[2] * width
    pages = kv[torch.tensor(table, dtype=torch.long)]
    k = pages[:, 0].view(len(table), heads, dim, -1).permute(1, 0, 3, 2).reshape(heads, -1, dim)
    v = pages[:, 1].reshape(len(table), -1)[:, :used].view(len(table), heads, -1, width)
    v = v.transpose(0, 1).reshape(heads, -1, width)
    return k[:, :length], v[:, :length]


@torch.library.custom_op("sitsc::paged_attention", mutates_args=("kv",))
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    kv: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    layer: int,
    page_tokens: int,
    scale: float,
    window: int,
    softcap: float,
    rope_style: str,
) -> Tensor:
    """Rotate q and k, write k and v to their pages, attend; a ragged batch of sequences.

    q [tokens, heads, dim], k and v [tokens, kv_heads, dim] (v may be narrower), cos and sin
    [tokens, rotary_dim],
    kv [pages, layers, 2, kv_heads, dim * page_tokens] (`layer` within the group),
    block_table [sequences, pages] int32, query_start [sequences + 1] int32,
    context_lens [sequences] int32 (tokens already in the pages). Out [tokens, heads * dim].
    """
    if rope_style != "none":
        assert cos is not None and sin is not None
        q = rope_reference(q, cos[:, None], sin[:, None], rope_style)
        k = rope_reference(k, cos[:, None], sin[:, None], rope_style)
    pool, dim = kv[:, layer], q.shape[-1]
    out = torch.empty((q.shape[0], q.shape[1] * v.shape[2]), dtype=q.dtype, device=q.device)
    starts, contexts = query_start.tolist(), context_lens.tolist()
    for sequence, before in enumerate(contexts):
        low, high = starts[sequence], starts[sequence + 1]
        table = block_table[sequence].tolist()
        for token in range(low, high):
            position = before + token - low
            page, slot = table[position // page_tokens], position % page_tokens
            _write_page(pool, k[token], v[token], page, slot)
        length = before + high - low
        used = table[: -(-length // page_tokens)]
        keys, values = _gather(pool, used, length, dim, v.shape[2])
        part = attend(
            q[low:high].transpose(0, 1), keys, values, before, scale, window, softcap, sinks
        )
        out[low:high] = part.reshape(high - low, -1).to(q.dtype)
    return out


@paged_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    sinks: Tensor | None,
    kv: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    layer: int,
    page_tokens: int,
    scale: float,
    window: int,
    softcap: float,
    rope_style: str,
) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1] * v.shape[2]))
