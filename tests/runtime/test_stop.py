"""Stop strings: found across boundaries, independent of where these lie."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sitsc.runtime.stop import AnswerText, StopMatcher
from sitsc.runtime.tokenizer import Tokenizer
from tests.runtime.tokenizers_for_tests import all_kinds

TEXT = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def simple(text: str, stop: list[str]) -> tuple[str, bool]:
    """The definition, one character at a time."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


@settings(max_examples=500)
@given(st.lists(TEXT, max_size=8), STOPS)
def test_boundaries_do_not_matter(chunks: list[str], stop: list[str]) -> None:
    matcher, shown, stopped = StopMatcher(stop), "", False
    for index, chunk in enumerate(chunks):
        text, stopped = matcher.push(chunk)
        shown += text
        if stopped:
            break
        so_far = "".join(chunks[: index + 1])
        held = so_far[len(shown) :]
        assert so_far == shown + held
        # exactly what may still begin a stop string is held, not a character more
        begins = [s[:n] for s in stop for n in range(1, len(s)) if so_far.endswith(s[:n])]
        assert held == max(begins, key=len, default="")
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == simple("".join(chunks), stop)


def test_earliest_end_then_longest() -> None:
    assert StopMatcher(["abcde", "bcd"]).push("xabcde") == ("xa", True)
    assert StopMatcher(["d", "cd"]).push("abcd") == ("ab", True)


def answer(name: str, text: str, stop: list[str], min_tokens: int = 0, end: str = "length"):
    """Shown text, number of tokens used, and whether a stop string ended it."""
    tokenizer = Tokenizer(all_kinds()[name].to_str().encode())
    ids = tokenizer.encode(text, add_bos=False)
    made, shown = AnswerText(tokenizer.detokenizer(), stop, min_tokens), ""
    for number, token in enumerate(ids, 1):
        new, stopped = made.push(token, end if number == len(ids) else None)
        shown += new
        if stopped:
            return shown, number, True
    return shown, len(ids), False


@pytest.mark.parametrize("name", ["byte_level", "llama2"])
def test_cut_before_the_stop_string(name: str) -> None:
    assert answer(name, "hello, hello🙂ld", ["o🙂"])[::2] == ("hello, hell", True)
    assert answer(name, "hello, hello🙂", ["o🙂"])[::2] == ("hello, hell", True)  # in the flush
    assert answer(name, "hello, hello", ["o🙂"])[::2] == ("hello, hello", False)


def test_min_tokens_delays_stop_strings() -> None:
    text = "a1b1c1"
    assert answer("byte_level", text, ["1"]) == ("a", 2, True)
    assert answer("byte_level", text, ["1"], min_tokens=3) == ("a1b", 4, True)


def test_text_of_the_end_token_is_not_shown() -> None:
    assert answer("byte_level", "a1b", [], end="stop")[0] == "a1"
