"""A graph whose tokens meet elsewhere than in attention is refused; each token by itself is not."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from sitsc.core.errors import UnsupportedModelError
from sitsc.frontend.apart import check_tokens_apart

WIDTH = 8


class Model(nn.Module):
    """Rows of a table, `mix` over them [tokens, WIDTH], and the rows that want logits."""

    def __init__(self, mix: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mix = mix

    def forward(self, token_ids: Tensor, logit_rows: Tensor) -> Tensor:
        return self.mix(self, self.table(token_ids))[logit_rows]


def graph_of(mix: Any) -> fx.Graph:
    ids, rows = torch.zeros(9, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    moving = {"token_ids": {0: torch.export.Dim("tokens", min=2)}}
    moving |= {"logit_rows": {0: torch.export.Dim("rows", min=2)}}
    program = torch.export.export(Model(mix), (ids, rows), dynamic_shapes=moving, strict=False)
    graph = program.run_decompositions({}).graph
    for node in graph.find_nodes(op="placeholder"):
        if node.name in moving:
            node.meta["input"] = node.name
    return graph


MIXING: dict[str, Any] = {
    "a convolution": lambda m, x: m.conv(x.T[None])[0, :, : x.shape[0]].T,
    "a shift": lambda m, x: x + nn.functional.pad(x, (0, 0, 1, 0))[:-1],
    "a rotation": lambda m, x: x + x.roll(1, 0),
    "a running sum": lambda m, x: x.cumsum(0),
    "a mean": lambda m, x: x - x.mean(0, keepdim=True),
    "a maximum": lambda m, x: x - x.amax(0),
    "scores of tokens by tokens": lambda m, x: (x @ x.T).softmax(-1) @ x,
    "a product over tokens": lambda m, x: x @ (x.T @ x),
    "a softmax over tokens": lambda m, x: x.softmax(0),
    "the first token": lambda m, x: x + x[:1],
    "the order turned round": lambda m, x: x + x.flip(0),
    "tokens by rank": lambda m, x: x[x[:, 0].argsort()],
    "tokens side by side": lambda m, x: torch.cat([x[:1], x])[: x.shape[0]],
    "a shift that keeps the size": lambda m, x: nn.functional.pad(x, (0, 0, 5, -5)),
}
COUNTING: dict[str, Any] = {
    "a factor": lambda m, x: x * x.shape[0],
    "a bound": lambda m, x: x.clamp(max=x.shape[0]),
    "a tensor of it": lambda m, x: x * torch.full((), 1.0 * x.shape[0]).log().clamp(min=1.0),
    "places from the end": lambda m, x: x + torch.arange(x.shape[0] - 1, -1, -1)[:, None],
}
APART: dict[str, Any] = {
    "a linear layer": lambda m, x: m.linear(x),
    "a norm": lambda m, x: nn.functional.layer_norm(x, (WIDTH,)),
    "a softmax": lambda m, x: x.softmax(-1),
    "the best of each": lambda m, x: x * x.topk(2, -1)[0].sum(-1, keepdim=True),
    "a norm by statistics of training": lambda m, x: nn.functional.batch_norm(
        x, x.new_zeros(WIDTH), x.new_ones(WIDTH)
    ),
    "padded features": lambda m, x: nn.functional.pad(x, (2, -2)),
    "heads apart": lambda m, x: x.view(-1, 2, 4).transpose(0, 1).transpose(0, 1).reshape(-1, 8),
    "a batch of one": lambda m, x: m.linear(x[None])[0],
    "halves turned": lambda m, x: torch.cat([-x[:, 4:], x[:, :4]], -1),
    "choices in turn": lambda m, x: (
        m.linear(x[:, None].expand(-1, 3, -1).reshape(-1, 8)).view(-1, 3, 8).sum(1)
    ),
    "what is not used": lambda m, x: (x, x.mean(0))[0],
}


@pytest.mark.parametrize("kind", MIXING)
def test_tokens_that_meet_are_refused(kind: str):
    with pytest.raises(UnsupportedModelError, match="mixes the tokens of a step"):
        check_tokens_apart(graph_of(MIXING[kind]))


@pytest.mark.parametrize("kind", COUNTING)
def test_the_number_of_tokens_is_no_value(kind: str):
    with pytest.raises(UnsupportedModelError, match="computes with the number of tokens"):
        check_tokens_apart(graph_of(COUNTING[kind]))


@pytest.mark.parametrize("kind", APART)
def test_tokens_by_themselves_pass(kind: str):
    check_tokens_apart(graph_of(APART[kind]))
