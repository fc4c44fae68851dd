"""Nonsense options are refused by name, value and range; sensible ones are kept as given."""

import math
from typing import Any

import pytest

from sitsc.core.errors import OptionError
from sitsc.core.sampling import SamplingOptions


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 300),  # above max_tokens
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 101),
        ("temperature", 1e-9),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2**63),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", math.inf),
        ("seed", -1),
        ("seed", 0.5),
        ("stop", ("",)),
        ("stop", "END"),
        ("stop", ["END"]),
        ("stop", (1,)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 1025,)),
        ("ignore_eos", 1),
    ],
)
def test_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingOptions(**{option: value})
    assert option in str(caught.value)
    assert caught.value.hint


def test_edges_are_accepted() -> None:
    options = SamplingOptions(
        max_tokens=1,
        temperature=100,
        top_k=10**9,
        top_p=1e-9,
        min_p=1,
        repetition_penalty=100,
        seed=2**63 - 1,
        stop=("x" * 1024,) * 16,
        min_tokens=1,
    )
    assert not options.is_greedy
    assert SamplingOptions().is_greedy
