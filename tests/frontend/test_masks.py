"""Masks of transformers' models become a window or are refused; none is taken for causal."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as theirs

from sitsc.core.errors import UnsupportedModelError
from sitsc.frontend.masks import Seen, agreed_window, window_of
from sitsc.frontend.trace import trace
from sitsc.passes.fxutil import arguments, calls
from tests.compiled_families import FAMILIES


@given(st.integers(1, 300), st.booleans())
def test_windows_are_found(window: int, told: bool):
    mask = theirs.sliding_window_causal_mask_function(window)
    assert window_of(mask, window if told else 0) == window


def test_a_causal_mask_has_no_window():
    assert window_of(theirs.causal_mask_function, 0) == 0
    # Wider than every row that is looked at: the rows around its edge are looked at, too.
    wide = theirs.sliding_window_causal_mask_function(32768)
    assert window_of(wide, 32768) == 32768


def seen_both_ways(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) | (key < 4)


def of_the_tokens(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return torch.empty(8, device="meta")[key] > 0


@given(st.integers(2, 300))
def test_chunks_are_no_window(size: int):
    chunks = theirs.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))
    assert window_of(chunks, size) is None


@pytest.mark.parametrize(
    "mask", [theirs.bidirectional_mask_function, seen_both_ways, of_the_tokens]
)
def test_other_masks_are_no_window(mask: Any):
    assert window_of(mask, 0) is None


def test_mask_and_attention_must_agree():
    assert agreed_window(None, 16, 0) == 16
    assert agreed_window(Seen(16), 16, 0) == agreed_window(Seen(16), 0, 0) == 16
    with pytest.raises(UnsupportedModelError, match=r"layer 3 attends with a window of 16.*all"):
        agreed_window(Seen(0), 16, 3)
    with pytest.raises(UnsupportedModelError, match="layer 3 hides tokens otherwise"):
        agreed_window(Seen(None), 0, 3)
    with pytest.raises(UnsupportedModelError, match="its own attention mask"):
        agreed_window(torch.zeros(1), 0, 3)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss", "qwen2_windows"])
def test_windows_of_families_are_those_of_their_masks(family: str):
    config = FAMILIES[family]
    layers = calls(trace(config, torch.float32).graph, "attention")
    windows = [arguments(node)["window"] for node in layers]
    expected = {"mistral": [16, 16], "qwen2_windows": [0, 16]}
    assert windows == expected.get(family, [16, 0])


def test_attention_in_chunks_is_refused():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "intermediate_size_mlp": 96}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "vocab_size": 256, "num_local_experts": 2, "moe_layers": []}
    with pytest.raises(UnsupportedModelError):
        trace({"model_type": "llama4_text", "attention_chunk_size": 16, **sizes}, torch.float32)
