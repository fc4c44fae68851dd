"""The arena planner against an independent checker, over random lifetimes and random graphs."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.node import map_arg

from sitsc.core.plan import ArenaBuffer
from sitsc.passes.cost import Sizes
from sitsc.passes.memory import ALIGNMENT, aligned, graph_buffers, plan_arena


def overlaps(buffers: tuple[ArenaBuffer, ...]) -> list[tuple[str, str]]:
    """Pairs that share a byte at a step: byte by byte, knowing nothing of how they were placed."""
    owner: dict[tuple[int, int], str] = {}
    bad = []
    for buffer in buffers:
        first, last = buffer.offset // ALIGNMENT, (buffer.offset + buffer.bytes - 1) // ALIGNMENT
        for unit in range(first, last + 1):
            for step in range(buffer.first, buffer.last + 1):
                if (unit, step) in owner:
                    bad.append((owner[unit, step], buffer.name))
                owner[unit, step] = buffer.name
    return bad


@st.composite
def lifetimes(draw: st.DrawFn) -> list[ArenaBuffer]:
    buffers = []
    for index in range(draw(st.integers(0, 24))):
        first = draw(st.integers(0, 12))
        last = first + draw(st.integers(0, 6))
        size = draw(st.integers(1, 1500))
        buffers.append(ArenaBuffer(f"b{index}", "uint8", (size,), 0, size, first, last))
    return buffers


@given(lifetimes())
@settings(max_examples=200, deadline=None)
def test_buffers_that_live_together_never_overlap(buffers):
    arena = plan_arena(buffers)
    assert [b.name for b in arena.buffers] == [b.name for b in buffers]
    assert overlaps(arena.buffers) == []
    assert all(b.offset % ALIGNMENT == 0 for b in arena.buffers)
    assert all(b.offset + b.bytes <= arena.bytes for b in arena.buffers)
    assert plan_arena(buffers) == arena
    live = [
        sum(aligned(b.bytes) for b in buffers if b.first <= step <= b.last) for step in range(20)
    ]
    assert max(live, default=0) <= arena.bytes <= sum(aligned(b.bytes) for b in buffers)


def test_the_checker_finds_a_planted_overlap():
    buffers = [ArenaBuffer(n, "uint8", (100,), 0, 100, 0, 3) for n in ("a", "b")]
    arena = plan_arena(buffers)
    broken = (arena.buffers[0], replace(arena.buffers[1], offset=arena.buffers[0].offset + 64))
    assert set(overlaps(broken)) == {("a", "b")}


@st.composite
def random_graph(draw: st.DrawFn) -> fx.Graph:
    """A graph of elementwise operations and views, with fake values."""
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        x = graph.placeholder("x")
        x.meta["val"] = torch.empty(8, draw(st.integers(1, 40)))
        nodes = [x]
        for _ in range(draw(st.integers(1, 30))):
            source = draw(st.sampled_from(nodes))
            kind = draw(st.sampled_from(["neg", "relu", "reshape", "transpose"]))
            value = source.meta["val"]
            if kind == "reshape":
                node = graph.call_function(torch.ops.aten.reshape.default, (source, [-1, 8]))
                made = value.reshape(-1, 8)
            elif kind == "transpose":
                node = graph.call_function(torch.ops.aten.transpose.int, (source, 0, 1))
                made = value.transpose(0, 1)
            else:
                node = graph.call_function(getattr(torch.ops.aten, kind).default, (source,))
                made = value.neg()
            node.meta["val"] = made
            nodes.append(node)
        graph.output(nodes[-1])
    return graph


@given(random_graph())
@settings(max_examples=60, deadline=None)
def test_running_a_graph_in_its_planned_arena_gives_the_right_values(graph):
    """Execute with every value stored where the plan says; a wrong lifetime corrupts the result."""
    torch.manual_seed(0)
    x = torch.randn(next(iter(graph.nodes)).meta["val"].shape)
    wanted = fx.Interpreter(fx.GraphModule(nn.Module(), graph)).run(x)
    arena = plan_arena(graph_buffers(graph, Sizes({}, {})))
    places = {b.name: b for b in arena.buffers}
    block = torch.full((arena.bytes,), 255, dtype=torch.uint8)
    values = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = x
        elif node.op == "output":
            assert torch.equal(values[node.args[0]], wanted)
        else:
            args = map_arg(node.args, lambda n: values[n])
            made = node.target(*args)
            if (place := places.get(node.name)) is not None:
                raw = block[place.offset : place.offset + place.bytes]
                stored = raw.view(torch.float32).view(made.shape)
                stored.copy_(made)
                made = stored
            values[node] = made
