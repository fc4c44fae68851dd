"""The engine over a real tiny model: its answers, whatever the batching, and how they end."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.core.errors import RequestError
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.engine import Engine
from tests.runtime.engine_models import (
    BACKEND,
    EOS,
    PROMPTS,
    TOKENIZER,
    VOCAB,
    WIDTH,
    AheadExecutor,
    PagedExecutor,
    drain,
    engine,
    is_clean,
    one_thread,  # noqa: F401  (a fixture of every test here)
    plain,
)


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
