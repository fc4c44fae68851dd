"""Collectives alone in a process, in lockstep, and what their values are."""

import torch
from torch import Tensor, fx, nn

from sitsc.core.lockstep import Stage
from sitsc.core.ops.collectives import sum_of_ranks

_OPS = torch.ops.sitsc


def test_alone_a_rank_is_the_whole_group():
    x, residual = torch.randn(3, 5), torch.randn(3, 5)
    assert torch.equal(_OPS.all_reduce(x, None, "tp"), x)
    assert torch.equal(_OPS.all_reduce(x, residual, "tp"), residual + x)
    assert torch.equal(_OPS.all_gather(x, 1, 2, "tp"), torch.cat((x, x), 1))
    out = _OPS.all_reduce(x, None, "tp")
    out.zero_()
    assert not torch.equal(out, x)  # a tensor of its own


def test_sums_are_taken_in_the_order_of_ranks_in_fp32():
    parts = [torch.tensor([value]).bfloat16() for value in (256.0, 1.0, 1.0, -256.0)]
    assert sum_of_ranks(parts, None).item() == 2.0
    assert sum_of_ranks(parts, torch.tensor([0.5]).bfloat16()).item() == 2.5


def test_fake_values_have_the_shapes_of_real_ones():
    x = torch.empty(2, 3, 4, device="meta", dtype=torch.bfloat16)
    for value in (_OPS.all_reduce(x.transpose(1, 2), None, "tp"), _OPS.all_gather(x, 2, 4, "tp")):
        assert value.dtype == torch.bfloat16 and value.is_contiguous()
    assert _OPS.all_gather(x, -1, 4, "tp").shape == (2, 3, 16)


def test_lockstep_walks_all_ranks_together():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["input"] = "x"
    total = graph.call_function(_OPS.all_reduce.default, (x, x, "tp"))
    graph.output(graph.call_function(_OPS.all_gather.default, (total, 0, 3, "tp")))
    graph = fx.GraphModule(nn.Module(), graph).graph
    parts = [torch.tensor([1.0]), torch.tensor([1.0]), torch.tensor([1.0])]

    def read(name: str, start: int, stop: int) -> Tensor:
        raise AssertionError(name)

    (found,) = Stage(graph, [{}, {}, {}], read).run([{"x": part} for part in parts])
    assert found.tolist() == [4.0, 4.0, 4.0]
