"""One request and its life: waiting, running, finished with exactly one reason.

Plain Python, no torch. The scheduler alone changes a request; pages belong to the page pool.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from sitsc.core.errors import CapacityError, RequestError
from sitsc.core.sampling import SamplingOptions

FinishReason = Literal["stop", "length", "abort", "error"]


def check_vocabulary(ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError for ids that are no token."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise RequestError(
            f"token ids {min(ids)} to {max(ids)} are not all in the vocabulary",
            hint=f"ids run from 0 to {vocab_size - 1}",
        )


def check_length(num_tokens: int, context_tokens: int) -> None:
    """Raises RequestError for an empty prompt, CapacityError for one too long to be answered."""
    if not num_tokens:
        raise RequestError("the prompt is empty", hint="give at least one token")
    if num_tokens >= context_tokens:
        raise CapacityError(
            f"the prompt has {num_tokens} tokens, the context holds {context_tokens} with at least"
            " one of the answer",
            hint=f"shorten the prompt to at most {context_tokens - 1} tokens",
        )


class RequestState(Enum):
    """Where a request stands; a preempted request waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """A prompt being continued. `token_ids` holds prompt and generated tokens, oldest first.

    `num_computed` counts the leading tokens whose KV lies in pages, or will when the steps in
    flight have ended; `num_pending` tokens are sampled by those steps and not known yet.
    `max_tokens` is the option clipped to the context. `arrival` orders requests: smaller is older.
    """

    id: int
    prompt_ids: Sequence[int]
    options: SamplingOptions
    arrival: int
    max_tokens: int
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    num_pending: int = 0
    num_preemptions: int = 0
    token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, those not known yet included."""
        return len(self.token_ids) + self.num_pending

    @property
    def is_ending(self) -> bool:
        """Whether the tokens not known yet are the last ones that it may have."""
        return self.num_generated + self.num_pending >= self.max_tokens

    @property
    def generated_ids(self) -> list[int]:
        """The sampled tokens, end-of-text token included."""
        return self.token_ids[len(self.prompt_ids) :]

    def ending_with(self, token_id: int, eos_ids: Collection[int]) -> FinishReason | None:
        """Why the request would end if `token_id` came next: "stop", "length", or not at all."""
        num_generated = len(self.token_ids) - len(self.prompt_ids) + 1
        if token_id in eos_ids and not self.options.ignore_eos:
            if num_generated > self.options.min_tokens:
                return "stop"
        return "length" if num_generated >= self.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        """End the request; a request ends once."""
        assert self.finish_reason is None, f"request {self.id} ends twice"
        self.state, self.finish_reason = RequestState.FINISHED, reason
