"""How fast a step can be at best: bytes and operations of the plan over measured ceilings.

Weights are read once a step and keys and values of every token once; linear layers take the longer
of reading and multiplying. Nothing else is counted, so that no implementation is faster.
"""

from dataclasses import dataclass

from sitsc.core.plan import Launch, LaunchGroup, Plan, Regime

_ATTENTION = ("attention", "kv_")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes read and floating-point operations a second of one device."""

    read_bytes_per_s: float
    flops_per_s: float


def decode_limit_ms(plan: Plan, batch: int, context: float, ceilings: Ceilings) -> float:
    """Milliseconds of one decode step of `batch` sequences of `context` tokens."""
    nbytes, flops = _linear(_decode_regime(plan, batch).groups)
    linear = max(nbytes / ceilings.read_bytes_per_s, flops / ceilings.flops_per_s)
    return 1e3 * (linear + batch * kv_bytes(plan, context) / ceilings.read_bytes_per_s)


def prefill_limit_ms(plan: Plan, tokens: int, ceilings: Ceilings) -> float:
    """Milliseconds of computing a lone prompt of `tokens` tokens and its first token."""
    groups = _decode_regime(plan, 1).groups
    nbytes, _ = _linear(groups)
    _, each = _linear(tuple(g for g in groups if g.layers))
    _, once = _linear(tuple(g for g in groups if not g.layers))
    flops = tokens * each + once + attention_flops(plan, tokens)
    return 1e3 * max(nbytes / ceilings.read_bytes_per_s, flops / ceilings.flops_per_s)


def kv_bytes(plan: Plan, context: float) -> float:
    """Bytes of keys and values that one token of a sequence of `context` tokens reads."""
    return sum(g.page_bytes / g.page_tokens * min(context, g.window or context) for g in plan.kv)


def attention_flops(plan: Plan, tokens: int) -> float:
    """Operations of causal attention over a prompt, both products, all layers."""
    heads = plan.model.dimensions.get("num_attention_heads", 0)
    total = 0.0
    for group in plan.kv:
        reach = min(tokens, group.window or tokens)
        pairs = reach * (reach + 1) / 2 + (tokens - reach) * reach
        total += 4.0 * heads * group.head_dim * pairs * len(group.layers)
    return total


def _decode_regime(plan: Plan, batch: int) -> Regime:
    """The smallest decode regime that holds `batch` sequences."""
    found = [r for r in plan.regimes if r.kind == "decode" and r.sizes["sequences"] >= batch]
    return min(found, key=lambda r: r.sizes["sequences"])


def _linear(groups: tuple[LaunchGroup, ...]) -> tuple[float, float]:
    """Bytes and operations of everything but attention."""
    nbytes, flops = 0.0, 0.0
    for group in groups:
        for launch in group.launches:
            if not _is_attention(launch):
                nbytes += launch.bytes * max(1, len(group.layers))
                flops += launch.flops * max(1, len(group.layers))
    return nbytes, flops


def _is_attention(launch: Launch) -> bool:
    return launch.template.startswith(_ATTENTION)
