"""Canonical JSON: one text for one value, and nothing that JSON cannot hold."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sitsc.core.canonical import canonical_json, digest, sha256_hex

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def _shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shuffled(value[key]) for key in reversed(list(value))}
    if isinstance(value, list):
        return tuple(_shuffled(item) for item in value)
    return value


@given(VALUES)
def test_order_and_kind_of_sequence_do_not_matter(value: Any):
    assert canonical_json(_shuffled(value)) == canonical_json(value)


@given(VALUES)
def test_reading_and_writing_again_gives_the_same(value: Any):
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text
    assert text.isascii()
    assert text.endswith("\n")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") + 0.0
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


@given(VALUES)
def test_the_text_is_that_of_json(value: Any):
    text = json.dumps(_rounded(value), sort_keys=True, indent=1) + "\n"
    assert canonical_json(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False, width=64))
def test_floats_keep_six_digits(value: float):
    kept = json.loads(canonical_json(value))
    assert kept == pytest.approx(value, rel=1e-5, abs=0.0)


def test_nought_has_no_sign():
    assert canonical_json(-0.0) == canonical_json(0.0)


def test_floats_are_written_the_shortest_way():
    text = canonical_json([1.0, 0.1, 1 / 3, 1e-7, 123456789.0, -0.5])
    assert json.dumps(json.loads(text)) == "[1.0, 0.1, 0.333333, 1e-07, 123457000.0, -0.5]"


def test_keys_are_sorted_at_every_depth():
    text = canonical_json({"b": {"z": 1, "a": 2}, "a": []})
    assert text == '{\n "a": [],\n "b": {\n  "a": 2,\n  "z": 1\n }\n}\n'


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, [math.nan], {"a": {"b": math.inf}}]
)
def test_what_is_not_finite_is_refused(value: Any):
    with pytest.raises(ValueError, match="no canonical form"):
        canonical_json(value)


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), {"a": 1j}])
def test_what_json_cannot_hold_is_refused(value: Any):
    with pytest.raises(ValueError, match="no canonical form"):
        canonical_json(value)


def test_keys_that_are_not_text_are_refused():
    with pytest.raises(ValueError, match="must be strings"):
        canonical_json({1: "a"})


def test_integers_keep_every_digit():
    assert json.loads(canonical_json(2**62 + 1)) == 2**62 + 1


def test_booleans_are_not_numbers():
    assert canonical_json([True, 1, 1.0]) == "[\n true,\n 1,\n 1.0\n]\n"


def test_the_digest_is_that_of_the_text_in_every_process():
    value = {"b": [1.5, "ü", None], "a": {"c": True}}
    assert digest(value) == sha256_hex(canonical_json(value).encode())
    code = f"from sitsc.core.canonical import digest; print(digest({value!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == digest(value)
