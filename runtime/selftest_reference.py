"""What the kernels of a plan must compute: its reference over sequences of random tokens.

In: a plan, its reference, placed weights. Out: logits of each sequence after its prompt and after
one more token, keys and values of each layer, and how far rounding alone moves them: the reference
is run again with every result of a layer's operators disturbed by about a unit in its last place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sitsc.core import ops  # noqa: F401  (registers what the reference calls)
from sitsc.core.ops.attention import attend
from sitsc.core.ops.rope import rope_reference
from sitsc.core.plan import Plan
from sitsc.core.reference import Reference

ATTENTION = "sitsc.paged_attention.default"
_DISTURBED = "sitsc."
_ROUNDING = 2.0**-8  # relative; moves a third of all bfloat16 values to a neighbour
_SHORTEST, _LONG = 3, 200
_MORE = 4  # tokens after the prompt


@dataclass(frozen=True, slots=True)
class Texts:
    """Sequences of one token more than their prompts, and the pages of each."""

    ids: tuple[tuple[int, ...], ...]
    tables: tuple[tuple[int, ...], ...]

    @property
    def prompts(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(ids) - 1 for ids in self.ids]


@dataclass(frozen=True, slots=True)
class Expected:
    """Logits [sequences, 2, width] and keys, values [prompt + 1, kv_heads, dim] by pool and layer.

    Keys and values are those of the sequences in `kept`.
    """

    logits: Tensor
    kept: tuple[int, ...]
    keys_values: dict[tuple[str, int], list[tuple[Tensor, Tensor]]]


def choose_lengths(plan: Plan) -> list[int]:
    """Prompt lengths, odd ones and one that is long, which fill the largest prefill bucket.

    As many sequences as the largest batch, fewer when the KV pool is too small for them.
    """
    batch, page = plan.schedule.max_batch, plan.kv[0].page_tokens
    buckets = sorted(plan.schedule.prefill_buckets)
    wanted = buckets[-2] * 9 // 8 if len(buckets) > 1 else 0
    usual = max(9, -(-wanted // batch))
    longest = max(1, plan.tokens.max_context - _MORE)
    lengths = [min(longest, max(_SHORTEST, usual - 6 + 5 * i % 13)) for i in range(batch)]
    lengths[0] = min(longest, max(_LONG, lengths[0]))
    left, kept = plan.memory.kv_pages, []
    for length in lengths:
        pages = -(-(length + _MORE) // page)
        if pages <= left:
            kept.append(length)
            left -= pages
    return kept or [max(1, min(longest, left * page - _MORE))]


def make_texts(plan: Plan, lengths: Sequence[int], seed: int = 5) -> Texts:
    """Random tokens, on pages in random order."""
    generator = torch.Generator().manual_seed(seed)
    page, vocabulary = plan.kv[0].page_tokens, plan.tokens.vocab_size
    counts = [-(-(length + _MORE) // page) for length in lengths]
    order = torch.randperm(plan.memory.kv_pages, generator=generator)[: sum(counts)].tolist()
    ids, tables = [], []
    for length, count in zip(lengths, counts, strict=True):
        row = torch.randint(0, vocabulary, (length + 1,), generator=generator)
        ids.append(tuple(row.tolist()))
        tables.append(tuple(order[:count]))
        del order[:count]
    return Texts(tuple(ids), tuple(tables))


def expected(
    plan: Plan,
    reference: Reference,
    weights: Mapping[str, Tensor],
    texts: Texts,
    *,
    disturbed: bool = False,
) -> Expected:
    """Run the reference over all sequences from their start, on the device of the weights."""
    device = next(iter(weights.values())).device
    starts = [0]
    for ids in texts.ids:
        starts.append(starts[-1] + len(ids))
    kept = tuple(sorted({0, len(texts.ids) - 1}))
    pools: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}

    def whole(*given: Any) -> Tensor:
        named = dict(zip(_argument_names(), given, strict=True))
        out, keys, values = attend_whole(named, starts)
        pools[named["kv"], named["layer"]] = [
            (keys[starts[i] : starts[i + 1]], values[starts[i] : starts[i + 1]]) for i in kept
        ]
        return out

    inputs: dict[str, Any] = {group.name: group.name for group in plan.kv}
    long = {"device": device, "dtype": torch.int64}
    inputs["token_ids"] = torch.tensor([i for ids in texts.ids for i in ids], **long)
    inputs["position_ids"] = torch.cat([torch.arange(len(ids), **long) for ids in texts.ids])
    ends = [[end - 2, end - 1] for end in starts[1:]]
    inputs["logit_rows"] = torch.tensor(ends, **long).flatten()
    inputs |= dict.fromkeys(("block_table", "query_start", "context_lens"))
    after = _disturb(device) if disturbed else lambda name, value: value
    with torch.no_grad():
        logits = reference.run(weights, inputs, {ATTENTION: whole}, after)
    return Expected(logits.float().view(len(texts.ids), 2, -1), kept, pools)


def attend_whole(named: dict[str, Any], starts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of sequences that begin at `starts` of the tokens; rotated keys, values."""
    q, k, v = named["q"], named["k"], named["v"]
    if named["rope_style"] != "none":
        cos, sin = named["cos"][:, None], named["sin"][:, None]
        q = rope_reference(q, cos, sin, named["rope_style"])
        k = rope_reference(k, cos, sin, named["rope_style"])
    shape: tuple[Any, Any, Any, Any]
    shape = (named["scale"], named["window"], named["softcap"], named["sinks"])
    parts = []
    for low, high in pairwise(starts):
        left, keys, values = (x[low:high].transpose(0, 1) for x in (q, k, v))
        part = attend(left, keys, values, 0, *shape)
        parts.append(part.reshape(high - low, -1))
    return torch.cat(parts).to(q.dtype), k, v


def row_errors(value: Tensor, wanted: Tensor) -> Tensor:
    """Relative error of the norm of each row [..., width]; infinite where not finite."""
    value, wanted = value.float(), wanted.float()
    errors = (value - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    return errors.nan_to_num(float("inf"), float("inf"))


def _argument_names() -> list[str]:
    return [a.name for a in torch.ops.sitsc.paged_attention.default._schema.arguments]


def _disturb(device: torch.device) -> Any:
    generator = torch.Generator(device).manual_seed(1)

    def after(name: str, value: Any) -> Any:
        rounded = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        if not rounded or not name.startswith(_DISTURBED):
            return value
        noise = torch.rand(value.shape, generator=generator, device=device).mul_(2).sub_(1)
        return (value.float() * (1 + _ROUNDING * noise)).to(value.dtype)

    return after
