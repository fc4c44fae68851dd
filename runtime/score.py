"""Scoring given tokens: logits of every position, and perplexity, through the executor that
serves.

In: token ids. Out: logits in chunks, or a figure. Uses the first pages of the KV pool, so it must
not run while requests are being served.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sitsc.core.errors import CapacityError
from sitsc.core.serving.batch import StepBatch
from sitsc.runtime.cpu_executor import CpuExecutor


def iterate_logits(executor: CpuExecutor, token_ids: Sequence[int]) -> Iterator[Tensor]:
    """Logits [count, width] of every token of one sequence, a few tokens a step."""
    plan = executor.plan
    group = plan.kv[0]
    step = plan.schedule.max_batch
    pages = -(-len(token_ids) // group.page_tokens)
    if len(token_ids) > plan.tokens.max_context or pages > plan.memory.kv_pages:
        raise CapacityError(
            f"{len(token_ids)} tokens to score, the context holds {plan.tokens.max_context}"
        )
    for start in range(0, len(token_ids), step):
        part = list(token_ids[start : start + step])
        batch = StepBatch(
            regime="prefill",
            request_ids=(0,),
            token_ids=part,
            query_start=[0, len(part)],
            context_lens=[start],
            block_tables=[list(range(pages))],
            sample=[True],
        )
        yield executor.execute(batch, rows=list(range(len(part))))


def perplexity(executor: CpuExecutor, token_ids: Sequence[int], window: int) -> float:
    """exp of the mean negative log-likelihood of each token given those before it in its window.

    Windows do not overlap; the first token of each is not scored.
    """
    total, count = 0.0, 0
    for start in range(0, len(token_ids), window):
        part = list(token_ids[start : start + window])
        if len(part) < 2:
            break
        logits = torch.cat(list(iterate_logits(executor, part)))
        losses = torch.nn.functional.cross_entropy(
            logits[:-1], torch.tensor(part[1:]), reduction="sum"
        )
        total, count = total + float(losses), count + len(part) - 1
    return math.exp(total / count)
