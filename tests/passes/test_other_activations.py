"""Activations that no kernel takes run as operators of torch: the graph computes what they do."""

import pytest
import torch
from modules import rewritten
from torch import Tensor, nn
from transformers.activations import ACT2FN

from sitsc.frontend.config_knowledge import knowledge
from sitsc.passes import CPU
from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.match_activation import MatchActivation

KNOWN = knowledge()["activations"]["known"]


class Gated(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(12, 20), nn.Linear(12, 20)
        self.activation = ACT2FN[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("name", KNOWN)
def test_every_activation_that_the_lint_lets_pass_is_computed(name: str):
    torch.manual_seed(0)
    assert any(isinstance(item, MatchActivation) for item in CPU)
    passes = (Canonicalise(), MatchActivation())
    rewritten(Gated(name), (torch.randn(7, 12) * 2,), *passes, dims="tokens")
