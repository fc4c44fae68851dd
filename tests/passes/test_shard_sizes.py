"""Any head counts, vocabularies and degrees: refused with what would do, or equal to one rank."""

import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from modules import graph_of
from sharding import COLLECTIVES, CONTEXT, Model, op_counts
from torch import Tensor, nn

from sitsc.core.errors import PartitionError
from sitsc.core.interpret import relative_error
from sitsc.core.parallel import Partition
from sitsc.models.presets import preset
from sitsc.passes.shard import gathers

_DIM = 4
_OPS: Any = torch.ops.sitsc


class Block(nn.Module):
    """One layer; q, k and v may be one linear layer, gate and up too."""

    def __init__(self, heads: int, kv: int, inter: int, fused: bool, bias: bool) -> None:
        super().__init__()
        hidden, self.fused = 8, fused
        self.sizes = [heads * _DIM, kv * _DIM, kv * _DIM]
        sizes = [sum(self.sizes)] if fused else self.sizes
        self.qkv = nn.ModuleList(nn.Linear(hidden, size, bias=bias) for size in sizes)
        self.o_proj = nn.Linear(heads * _DIM, hidden, bias=bias)
        widths = [2 * inter] if fused else [inter, inter]
        self.gate_up = nn.ModuleList(nn.Linear(hidden, size, bias=bias) for size in widths)
        self.down = nn.Linear(inter, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = [layer(x) for layer in self.qkv]
        q, k, v = parts[0].split(self.sizes, -1) if self.fused else parts
        q, k, v = (part.unflatten(-1, (-1, _DIM)).transpose(0, 1)[None] for part in (q, k, v))
        out = _OPS.attention(q, k, v, None, 0, 0.5, 0, 0.0)
        x = x + self.o_proj(out.flatten(2)[0])
        halves = [layer(x) for layer in self.gate_up]
        gate, up = halves[0].chunk(2, -1) if self.fused else halves
        return x + self.down(_OPS.glu(gate, up, "silu"))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, tied: bool, *sizes: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList([Block(*sizes)])
        self.head = nn.Linear(8, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, token_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = self.embed(token_ids) + 0 * position_ids[:, None]
        for layer in self.layers:
            x = layer(x)
        return self.head(x[logit_rows])


def _valid(heads: int, kv: int, inter: int) -> list[int]:
    fits = lambda t: heads % t == 0 and inter % t == 0 and (kv % t == 0 or t % kv == 0)  # noqa: E731
    return [t for t in range(1, heads + 1) if fits(t)]


@settings(max_examples=4)
@given(
    kv=st.integers(1, 4),
    group=st.integers(1, 4),
    inter=st.sampled_from([6, 12, 16, 24]),
    vocabulary=st.integers(5, 200),
    tp=st.integers(2, 6),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
@example(kv=3, group=3, inter=12, vocabulary=31, tp=2, flags=(False, False, True))
@example(kv=3, group=3, inter=12, vocabulary=31, tp=3, flags=(False, False, True))
@example(kv=2, group=4, inter=16, vocabulary=29, tp=4, flags=(True, True, False))
@example(kv=1, group=2, inter=6, vocabulary=5, tp=2, flags=(True, False, False))
def test_sizes(kv: int, group: int, inter: int, vocabulary: int, tp: int, flags: Any):
    heads, (fused, bias, tied) = kv * group, flags
    module = Decoder(vocabulary, tied, heads, kv, inter, fused, bias)
    ids = torch.arange(4) % vocabulary
    graph = graph_of(module, ids, ids.clone(), ids.clone(), dims="tokens")
    model = Model(graph, ids=[(3 * i * i + i) % vocabulary for i in range(22)])
    valid = _valid(heads, kv, inter)
    if tp not in valid:
        with pytest.raises(PartitionError) as caught:
            model.stages(Partition(tp=tp))
        listed = re.findall(r"\d+", caught.value.hint.split(";")[0])
        assert [int(n) for n in listed] == valid
        return
    (stage,) = model.stages(Partition(tp=tp))
    assert relative_error(model.result([stage], tp), model.wanted) < 1e-5
    assert [op_counts(stage)[name] for name in COLLECTIVES] == [3, 1]  # the logits are gathered
    assert not gathers(stage)


def test_smollm2_is_refused_at_two_and_equal_at_three(traced: Any):
    """9 query and 3 KV heads, at a small size."""
    config = preset("tiny-llama") | {"num_attention_heads": 9, "num_key_value_heads": 3}
    config |= {"head_dim": 8, "hidden_size": 72, "intermediate_size": 48, "num_hidden_layers": 3}
    model = Model(traced(config, "float32"))
    with pytest.raises(PartitionError, match="9 query heads do not divide by TP 2") as caught:
        model.stages(Partition(tp=2))
    assert "valid TP: 1, 3" in caught.value.hint
    for partition in (Partition(tp=3), Partition(pp=2), Partition(tp=3, pp=2), Partition(pp=3)):
        bounds = (0, 1, 3) if partition.pp == 2 else None
        stages = model.stages(partition, bounds)
        assert relative_error(model.result(stages, partition.tp), model.wanted) < 1e-5
    assert CONTEXT.target == "cpu"
