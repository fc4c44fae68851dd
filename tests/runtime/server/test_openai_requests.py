"""Bodies of requests: what each option becomes, and that none is ignored."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sitsc.core.errors import OptionError
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.server.openai_requests import MOST_ANSWERS, ChatRequest, CompletionRequest

HELLO = [{"role": "user", "content": "hello"}]


def options(**body: Any) -> list[SamplingOptions]:
    request = CompletionRequest.model_validate({"prompt": "x", **body})
    request.check()
    return request.options(request.num_tokens(100))


def test_defaults_are_those_of_the_api():
    assert options() == [SamplingOptions(max_tokens=16, temperature=1.0)]


def test_every_option_arrives():
    (made,) = options(
        max_tokens=9, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.1,
        seed=5, stop=["a", "b"], ignore_eos=True, min_tokens=2,
    )  # fmt: skip
    assert made == SamplingOptions(9, 0.5, 7, 0.9, 0.1, 1.1, 5, ("a", "b"), True, 2)


def test_a_seed_counts_up_and_none_stays_none():
    assert [made.seed for made in options(n=3, seed=5)] == [5, 6, 7]
    assert [made.seed for made in options(n=2)] == [None, None]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_chats_may_fill_the_context(name: str):
    assert ChatRequest(messages=HELLO).num_tokens(77) == 77
    assert ChatRequest.model_validate({"messages": HELLO, name: 5}).num_tokens(77) == 5


def test_two_names_of_one_option_are_refused():
    request = ChatRequest(messages=HELLO, max_tokens=5, max_completion_tokens=6)
    with pytest.raises(OptionError, match="are the same"):
        request.num_tokens(77)


@pytest.mark.parametrize(
    "prompt, found",
    [
        ("text", ["text"]),
        ([1, 2], [[1, 2]]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([], [[]]),
    ],
)
def test_prompts_of_every_kind(prompt: Any, found: list[Any]):
    assert CompletionRequest(prompt=prompt).prompts() == found


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, [1, "a"], [True], [1.5], [[["a"]]]])
def test_prompts_of_no_kind(prompt: Any):
    with pytest.raises(ValidationError):
        CompletionRequest(prompt=prompt)


def test_too_many_answers():
    with pytest.raises(OptionError, match=f"ask for {MOST_ANSWERS + 2} answers"):
        CompletionRequest(prompt=["a"] * (MOST_ANSWERS // 2 + 1), n=2).prompts()


@pytest.mark.parametrize(
    "name, value",
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("logprobs", True),
        ("logprobs", 1),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("echo", True),
        ("best_of", 2),
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
    ],
)
def test_what_is_not_computed_is_refused(name: str, value: Any):
    with pytest.raises(OptionError, match=f"'{name}' is not supported"):
        options(**{name: value})


@pytest.mark.parametrize(
    "name, value", [("presence_penalty", 0.0), ("logit_bias", {}), ("logprobs", None), ("n", 1)]
)
def test_values_that_change_nothing_are_taken(name: str, value: Any):
    assert options(**{name: value}) == options()


@given(st.text(min_size=1), st.none() | st.booleans() | st.integers() | st.text())
def test_unknown_options_are_refused(name: str, value: Any):
    known = set(CompletionRequest.model_fields)
    if name not in known:
        with pytest.raises(OptionError):
            options(**{f"x{name}": value})


def test_null_is_as_if_it_was_left_out():
    names = set(CompletionRequest.model_fields) - {"prompt"}
    assert options(**dict.fromkeys([*names, "logprobs", "tools"])) == options()
    assert options(stop="") == options(tool_choice="auto", top_logprobs=0) == options()


@pytest.mark.parametrize("name", ["temperature", "top_p", "n", "seed", "stream"])
def test_types_are_not_bent(name: str):
    with pytest.raises(ValidationError):
        options(**{name: "1"})


def test_stream_options_need_a_stream():
    with pytest.raises(OptionError, match="stream_options without stream"):
        options(stream_options={"include_usage": True})
    assert options(stream=True, stream_options={"include_usage": True})
