"""Paging attention: sinks, layouts, groups, and what a page cannot hold."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from modules import CONTEXT, graph_of
from torch import Tensor, nn

from sitsc.core.errors import UnsupportedModelError
from sitsc.passes.base import PassContext
from sitsc.passes.fxutil import arguments, calls, tensor
from sitsc.passes.page_attention import PageAttention
from sitsc.passes.runner import run_passes


class Attention(nn.Module):
    """sitsc::attention over q, k, v [1, heads, tokens, dim], with one sink a head."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(4).to(dtype))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.sitsc.attention(q, k, v, self.sinks, 0, 0.5, 0, 0.0)[0]


def _attention(dtype: torch.dtype, dim: int, context: PassContext = CONTEXT) -> Any:

    q, k = (torch.randn(1, heads, 6, 8, dtype=dtype) for heads in (4, 2))
    graph = graph_of(Attention(dtype), q, k, torch.randn(1, 2, 6, dim, dtype=dtype))
    run_passes(graph, (PageAttention(),), context)
    return calls(graph.graph, "paged_attention")[0]


def test_sinks_are_read_in_float32():
    assert tensor(arguments(_attention(torch.bfloat16, 8))["sinks"]).dtype == torch.float32
    assert arguments(_attention(torch.float32, 8))["sinks"].op == "placeholder"


def test_values_wider_than_keys_cannot_be_paged_nor_narrower_ones_off_the_cpu():
    assert tensor(_attention(torch.float32, 4)).shape[1] == 4 * 4
    with pytest.raises(UnsupportedModelError, match="8 and values of 16 elements"):
        _attention(torch.float32, 16)
    with pytest.raises(UnsupportedModelError, match="8 and values of 4 elements"):
        _attention(torch.float32, 4, replace(CONTEXT, target="a100"))


def test_layers_of_one_layout_share_a_pool():
    class Three(nn.Module):
        def forward(self, q: Tensor, k: Tensor, wide: Tensor) -> Tensor:
            one = torch.ops.sitsc.attention(q, k, k, None, 0, 0.5, 0, 0.0)
            other = torch.ops.sitsc.attention(wide, wide, wide, None, 1, 0.5, 7, 0.0)
            again = torch.ops.sitsc.attention(q, k, k, None, 2, 0.5, 3, 2.0)
            return (one + other + again)[0]

    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    graph = graph_of(Three(), q, k, torch.randn(1, 4, 6, 8))
    run_passes(graph, (PageAttention(),), CONTEXT)
    found = [arguments(node) for node in calls(graph.graph, "paged_attention")]
    assert [(a["kv"].meta["input"], a["layer"], a["window"], a["softcap"]) for a in found] == [
        ("kv_0", 0, 0, 0.0),
        ("kv_1", 0, 7, 0.0),
        ("kv_0", 1, 3, 2.0),
    ]
    pools = {a["kv"].meta["input"]: a["kv"] for a in found}
    assert pools["kv_0"].meta["dims"] == ("pages", 2, 2, 2, 8 * 16)
    assert pools["kv_1"].meta["dims"] == ("pages", 1, 2, 4, 8 * 16)
