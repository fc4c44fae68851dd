"""What one step of the model computes: the scheduler writes it, an executor reads it."""

from dataclasses import dataclass
from typing import Literal

UNKNOWN = -1  # a token id: what the step before sampled for the request


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Tokens of one step, sequence after sequence, without padding.

    `regime` is "decode" when every sequence has exactly one token and all of them are sampled,
    else "prefill" (ragged; may hold decoding sequences too). A token id may be `UNKNOWN` when the
    step before has not been read: then it is the token that it sampled for the request. Block
    tables are the page pool's own lists, read-only and valid until the next step is scheduled;
    table i covers `context_lens[i] + query_start[i + 1] - query_start[i]` tokens.
    """

    regime: Literal["decode", "prefill"]
    request_ids: tuple[int, ...]  # [seqs], oldest request first
    token_ids: list[int]  # [tokens]
    query_start: list[int]  # [seqs + 1], sequence i owns tokens [start[i], start[i + 1])
    context_lens: list[int]  # [seqs], tokens in the KV pages before this step
    block_tables: list[list[int]]  # [seqs][pages]
    sample: list[bool]  # [seqs], whether the sequence's last token yields a sampled token

    @property
    def num_seqs(self) -> int:
        """Sequences in the step."""
        return len(self.request_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return len(self.token_ids)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Request ids in the order of the rows of the step's logits."""
        if self.regime == "decode":
            return self.request_ids
        return tuple(i for i, wanted in zip(self.request_ids, self.sample, strict=True) if wanted)
