"""The engine over a real tiny model that sees only what the pages hold."""

import gc
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from sitsc.core.errors import CapacityError, ExecutionError, RequestError, SamplingError
from sitsc.core.sampling import SamplingOptions
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
        self.sampled = dict(zip(batch.sampled_ids, tokens, strict=True))
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


@settings(max_examples=16, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 12),
    st.integers(1, 9),
    st.integers(1, 6),
    st.floats(0, 1),
    st.sampled_from([PagedExecutor, AheadExecutor]),
)
def test_same_tokens_as_plain_generation(max_batch, extra, chunk, page_tokens, slack, kind) -> None:
    """Whatever the batching, chunking and page pressure, with steps ahead or without."""
    longest = max(len(TOKENIZER.encode(prompt)) for prompt in PROMPTS) + 16
    least = -(-longest // page_tokens)
    pages = least + int(slack * least * len(PROMPTS))
    made = engine(max_batch, max_batch + extra, chunk, longest, pages, page_tokens, kind=kind)
    answers = made.generate_batch(PROMPTS, SamplingOptions(max_tokens=16))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert list(answer.token_ids) == plain(prompt, 16)
        assert answer.text == BACKEND.decode(plain(prompt, 16))
    assert is_clean(made)


def test_a_step_starts_before_the_last_is_read() -> None:
    made = engine(kind=AheadExecutor)
    ahead = made.executor
    assert isinstance(ahead, AheadExecutor)
    (answer,) = made.generate_batch([PROMPTS[0]], SamplingOptions(max_tokens=8))
    assert list(answer.token_ids) == plain(PROMPTS[0], 8) and ahead.most_flying == 2
    ahead.most_flying = 0
    (answer,) = made.generate_batch(["a"], SamplingOptions(max_tokens=4))
    ids = made.add_request("a", SamplingOptions(max_tokens=4), mask=lambda generated: None)
    ahead.most_flying = 0
    outputs = drain(made)[ids]
    assert ahead.most_flying == 1, "a mask wants the tokens before it"
    assert [t for o in outputs for t in o.token_ids] == list(answer.token_ids)
    assert is_clean(made)


def test_a_failure_with_steps_ahead_ends_them_all() -> None:
    made = engine(kind=AheadExecutor)
    ahead = made.executor
    assert isinstance(ahead, AheadExecutor)
    for prompt in PROMPTS[:3]:
        made.add_request(prompt, SamplingOptions(max_tokens=20, ignore_eos=True))

    def fail(batch: StepBatch) -> None:
        if ahead.num_steps == 6:
            raise RuntimeError("gone")

    ahead.before = fail
    outputs = drain(made)
    assert [each[-1].finish_reason for each in outputs.values()] == ["error"] * 3
    ahead.flying = 0
    assert is_clean(made)


def test_preemption_changes_nothing() -> None:
    """Drawn tokens too: each request has its own random state."""
    options = [SamplingOptions(max_tokens=20, temperature=0.9, seed=i) for i in range(5)]
    roomy, tight = engine(), engine(pages=13)
    ids = [tight.add_request(p, o) for p, o in zip(PROMPTS, options, strict=True)]
    requests = [tight.scheduler.get(i) for i in ids]
    outputs = drain(tight)
    answers = roomy.generate_batch(PROMPTS, options)
    assert sum(request.num_preemptions for request in requests if request) > 0
    for request_id, answer in zip(ids, answers, strict=True):
        tokens = [token for output in outputs[request_id] for token in output.token_ids]
        assert tokens == list(answer.token_ids)
    assert is_clean(tight)


def test_stream_equals_batch() -> None:
    made = engine()
    outputs = list(made.generate(PROMPTS[0], SamplingOptions(max_tokens=10)))
    (whole,) = made.generate_batch([PROMPTS[0]], SamplingOptions(max_tokens=10))
    assert "".join(output.new_text for output in outputs) == whole.text
    assert [len(output.token_ids) for output in outputs] == [1] * 10
    assert outputs[-1].finish_reason == whole.finish_reason == "length"


def test_end_of_text_ends_and_is_not_shown() -> None:
    tokens = plain(PROMPTS[0], 12, eos=None)
    eos = tokens[6]
    first = tokens.index(eos)
    made = engine(eos=[eos])
    (answer,) = made.generate_batch([PROMPTS[0]], SamplingOptions(max_tokens=12))
    assert (list(answer.token_ids), answer.finish_reason) == (tokens[: first + 1], "stop")
    assert answer.text == BACKEND.decode(tokens[:first])
    (on,) = made.generate_batch([PROMPTS[0]], SamplingOptions(max_tokens=12, ignore_eos=True))
    assert (list(on.token_ids), on.finish_reason) == (tokens, "length")
    (more,) = made.generate_batch(
        [PROMPTS[0]], SamplingOptions(max_tokens=12, min_tokens=first + 2)
    )
    assert len(more.token_ids) >= first + 2 and eos not in more.token_ids[: first + 2]


def test_stop_string_is_cut_off() -> None:
    made = engine()
    (whole,) = made.generate_batch([PROMPTS[0]], SamplingOptions(max_tokens=24))
    stop = whole.text[7:10]
    outputs = list(made.generate(PROMPTS[0], SamplingOptions(max_tokens=24, stop=(stop,))))
    assert "".join(o.new_text for o in outputs) == whole.text[: whole.text.index(stop)]
    assert outputs[-1].finish_reason == "stop"
    assert is_clean(made)


def test_context_bounds_the_answer() -> None:
    made = engine(context=16, eos=())
    prompt = TOKENIZER.encode(PROMPTS[0])
    (answer,) = made.generate_batch([prompt], SamplingOptions(max_tokens=10**6))
    assert len(answer.token_ids) == 16 - len(prompt)
    assert answer.finish_reason == "length"


def test_refused_prompts() -> None:
    made = engine(context=16)
    for prompt, error in [
        ("", RequestError),
        ([], RequestError),
        ([VOCAB], RequestError),
        ([-1], RequestError),
        ([5] * 16, CapacityError),
        ("a\ud800", RequestError),
    ]:
        with pytest.raises(error):
            made.add_request(prompt)
    good, refused = made.generate_batch(["a", [5] * 99], SamplingOptions(max_tokens=2))
    assert good.error is None and len(good.token_ids) == 2
    assert isinstance(refused.error, CapacityError) and refused.finish_reason == "error"
    assert is_clean(made)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    made = engine(max_batch=2)
    failing: list[int] = []

    def fail_third(batch: StepBatch) -> None:
        if executor(made).num_steps == 3:
            failing.extend(batch.request_ids)
            raise RuntimeError("out of\nmemory")

    executor(made).before = fail_third
    ids = [made.add_request(prompt, SamplingOptions(max_tokens=6)) for prompt in PROMPTS]
    outputs = drain(made)
    assert sorted(outputs) == ids and failing == ids[:2]
    for request_id, prompt in zip(ids, PROMPTS, strict=True):
        last = outputs[request_id][-1]
        if request_id in failing:
            assert last.finish_reason == "error" and isinstance(last.error, ExecutionError)
            assert str(last.error) == "the step failed: RuntimeError: out of memory"
            assert isinstance(last.error.__cause__, RuntimeError)
        else:
            tokens = [token for output in outputs[request_id] for token in output.token_ids]
            assert tokens == plain(prompt, 16)[:6]
    assert is_clean(made)


@pytest.mark.parametrize("shape", [(1, WIDTH - 1), (3, WIDTH)])
def test_logits_of_a_wrong_shape_are_a_failed_step(shape) -> None:
    made = engine()
    executor(made).execute = lambda batch: torch.zeros(shape)
    (answer,) = made.generate_batch([[5]])
    assert isinstance(answer.error, ExecutionError)
    assert is_clean(made)


def test_an_interrupt_passes_and_leaves_the_engine_usable() -> None:
    made = engine()
    other = made.add_request("a", SamplingOptions(max_tokens=3))

    def interrupt(batch: StepBatch) -> None:
        if executor(made).num_steps == 2:
            raise KeyboardInterrupt

    executor(made).before = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(made.generate(PROMPTS[1], SamplingOptions(max_tokens=9)))
    assert [output.finish_reason for output in drain(made)[other]] == [None, "error"]
    (answer,) = made.generate_batch([PROMPTS[1]], SamplingOptions(max_tokens=9))
    assert list(answer.token_ids) == plain(PROMPTS[1], 16)[:9]
    assert is_clean(made)


def test_bad_logits_and_masks_end_one_request_only() -> None:
    made = engine()

    def broken(ids: Sequence[int]) -> torch.Tensor | None:
        raise ValueError("no such grammar")

    options = SamplingOptions(max_tokens=4)
    nothing = made.add_request("a", options, mask=lambda ids: torch.zeros(WIDTH, dtype=torch.bool))
    raising = made.add_request("a", options, mask=broken)
    fine = made.add_request("a", options, mask=lambda ids: None)
    outputs = drain(made)
    assert isinstance(outputs[nothing][-1].error, SamplingError)
    assert "the mask failed: ValueError: no such grammar" in str(outputs[raising][-1].error)
    assert [o.token_ids[0] for o in outputs[fine]] == plain("a", 16)[:4]
    assert is_clean(made)


def test_a_mask_follows_the_answer() -> None:
    made = engine()
    script = TOKENIZER.encode("hello", add_bos=False)
    seen: list[list[int]] = []

    def only(ids: Sequence[int]) -> torch.Tensor:
        seen.append(list(ids))
        allowed = torch.zeros(WIDTH, dtype=torch.bool)
        allowed[script[len(ids)] if len(ids) < len(script) else EOS] = True
        return allowed

    options = SamplingOptions(temperature=1.5)
    outputs = list(made.generate("a", options, mask=only))
    assert "".join(output.new_text for output in outputs) == "hello"
    assert outputs[-1].finish_reason == "stop"
    assert seen == [script[:n] for n in range(len(script) + 1)]


def test_abort_is_answered_once() -> None:
    made = engine(max_batch=1)
    ids = [made.add_request(prompt, SamplingOptions(max_tokens=20)) for prompt in PROMPTS[:3]]
    made.step()
    made.abort(ids[0])
    made.abort(ids[2])  # still waiting
    made.abort(ids[2])
    made.abort(12345)
    outputs = drain(made)
    assert [outputs[i][-1].finish_reason for i in ids] == ["abort", "length", "abort"]
    assert is_clean(made)


def test_streams_side_by_side_lose_nothing() -> None:
    made = engine()
    options = SamplingOptions(max_tokens=8)
    silent = made.add_request(PROMPTS[4], options)
    streams = [made.generate(prompt, options) for prompt in PROMPTS[:3]]
    tokens: list[list[int]] = [[], [], []]
    for _ in range(8):
        for stream, into in zip(streams, tokens, strict=True):
            into += next(stream).token_ids
    assert tokens == [plain(prompt, 16)[:8] for prompt in PROMPTS[:3]]
    assert all(next(stream, None) is None for stream in streams)
    assert [o.token_ids[0] for o in drain(made)[silent]] == plain(PROMPTS[4], 16)[:8]
    assert is_clean(made)


def test_closing_a_stream_frees_its_pages() -> None:
    made = engine()
    stream = made.generate(PROMPTS[0], SamplingOptions(max_tokens=20))
    next(stream)
    assert not is_clean(made)
    stream.close()
    assert is_clean(made)
    for _ in made.generate(PROMPTS[0]):
        break
    gc.collect()
    assert is_clean(made)


def test_without_a_tokenizer_ids_come_out() -> None:
    made = engine()
    bare = Engine(
        made.executor,
        None,
        made.scheduler.limits,
        num_pages=64,
        page_tokens=4,
        vocab_size=VOCAB,
        logits_width=WIDTH,
    )
    (answer,) = bare.generate_batch([[0, 9]], SamplingOptions(max_tokens=3))
    assert len(answer.token_ids) == 3 and answer.text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.add_request("text")
    with pytest.raises(RequestError, match="stop strings"):
        bare.add_request([1], SamplingOptions(stop=("x",)))
