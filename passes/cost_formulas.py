"""Bytes and operations of attention and experts as formulas of the sizes; knows no graph."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes read and written, operations, and the dtype whose ceiling applies."""

    bytes: int
    flops: int
    dtype: str


def active_experts(experts: int, top_k: int, tokens: int) -> float:
    """Distinct experts that `tokens` choose, on average, when each choice is as likely."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


def experts_share(experts: int, top_k: int, tokens: int) -> float:
    """The share of all experts that `tokens` choose, on average: whose weights are read."""
    return active_experts(experts, top_k, tokens) / experts


def attention_cost(
    tokens: int,
    sequences: int,
    context: int,
    heads: int,
    kv_heads: int,
    dim: int,
    itemsize: int,
    window: int,
) -> tuple[int, int]:
    """(bytes of keys and values, operations): a new token sees context and what came before it."""
    length = context + tokens // sequences
    pairs = tokens * (context + (tokens // sequences + 1) / 2)
    if window:
        length, pairs = min(length, window), min(pairs, tokens * window)
    moved = 2 * sequences * length * kv_heads * dim * itemsize
    return moved, int(4 * pairs * heads * dim)
