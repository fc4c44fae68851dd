"""A real tiny model that sees only what the pages hold, as the executor of an engine."""

from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sitsc.core.serving.batch import UNKNOWN, StepBatch
from sitsc.core.serving.scheduler import SchedulerLimits
from sitsc.runtime.engine import Engine, Output
from sitsc.runtime.sampler import SamplerRow
from sitsc.runtime.tokenizer import Tokenizer
from tests.runtime.tokenizers_for_tests import byte_level

BACKEND = byte_level()
TOKENIZER = Tokenizer(BACKEND.to_str().encode())
VOCAB, WIDTH, EOS = TOKENIZER.vocab_size, TOKENIZER.vocab_size + 11, 1
PROMPTS = ["hello world", "how are you", "привет 🙂", "don't stop now, hello world hello", "a"]


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WIDTH,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 0  # padding: logit 0
    return model


MODEL = tiny_model()


@pytest.fixture(autouse=True)
def one_thread():
    """A tiny model on several threads only waits for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class PagedExecutor:
    """Runs the model on what it reads back from a token store addressed by block tables."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self.store = torch.full((num_pages, page_tokens), -1)
        self.before: Callable[[StepBatch], None] = lambda batch: None
        self.num_steps = 0

    @torch.no_grad()
    def execute(self, batch: StepBatch) -> torch.Tensor:
        self.num_steps += 1
        self.before(batch)
        rows = [torch.empty(0, WIDTH)]
        for row, table in enumerate(batch.block_tables):
            start, end = batch.query_start[row : row + 2]
            context = batch.context_lens[row]
            pages = torch.tensor(table)
            slots = torch.arange(context, context + end - start)
            page_tokens = self.store.shape[1]
            new = torch.tensor(batch.token_ids[start:end])
            self.store[pages[slots // page_tokens], slots % page_tokens] = new
            ids = self.store[pages].flatten()[: context + end - start]
            if batch.sample[row]:
                rows.append(MODEL(ids[None]).logits[0, -1:])
        return torch.cat(rows)


class AheadExecutor(PagedExecutor):
    """Keeps sampled tokens to itself until they are collected, like a device; greedy only."""

    num_ahead = 1

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        super().__init__(num_pages, page_tokens)
        self.sampled: dict[int, int] = {}
        self.flying = self.most_flying = 0

    def submit(self, batch: StepBatch, rows: Sequence[SamplerRow]) -> list[int]:
        self.flying += 1
        self.most_flying = max(self.most_flying, self.flying)
        for row, request_id in enumerate(batch.request_ids):
            last = batch.query_start[row + 1] - 1
            if batch.token_ids[last] == UNKNOWN:
                batch.token_ids[last] = self.sampled[request_id]
        tokens = self.execute(batch)[:, :VOCAB].argmax(-1).tolist()
        self.sampled |= dict(zip(batch.sampled_ids, tokens, strict=True))
        return tokens

    def collect(self, step: list[int]) -> list[int]:
        self.flying -= 1
        return step

    def forget(self, request_id: int) -> None:
        pass


def engine(
    max_batch=4,
    step=16,
    chunk=5,
    context=64,
    pages=64,
    page_tokens=4,
    eos=(EOS,),
    kind: type[PagedExecutor] = PagedExecutor,
) -> Engine:
    limits = SchedulerLimits(max_batch, step, chunk, context)
    return Engine(
        kind(pages, page_tokens),
        TOKENIZER,
        limits,
        num_pages=pages,
        page_tokens=page_tokens,
        vocab_size=VOCAB,
        logits_width=WIDTH,
        eos_ids=eos,
    )


def executor(made: Engine) -> PagedExecutor:
    assert isinstance(made.executor, PagedExecutor)
    return made.executor


@cache
def plain(prompt: str, num: int, eos: int | None = EOS) -> list[int]:
    """Greedy tokens by transformers, with its own cache and no paging."""
    ids = torch.tensor([TOKENIZER.encode(prompt)])
    out = MODEL.generate(  # pyright: ignore[reportAttributeAccessIssue]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num,
        eos_token_id=eos,
        pad_token_id=0,
        suppress_tokens=list(range(VOCAB, WIDTH)),
    )
    return out[0, ids.shape[1] :].tolist()


def is_clean(made: Engine) -> bool:
    """Nothing is left of any request."""
    while made.has_work:
        assert not made.step()
    made.scheduler.check()
    pool = made.scheduler.pages
    return pool.num_free == pool.num_pages and not made.has_work and not made._mail


def drain(made: Engine) -> dict[int, list[Output]]:
    outputs: dict[int, list[Output]] = {}
    while made.has_work:
        for output in made.step():
            outputs.setdefault(output.request_id, []).append(output)
        made.scheduler.check()
    for each in outputs.values():
        assert [o.finish_reason is not None for o in each] == [False] * (len(each) - 1) + [True]
    return outputs
