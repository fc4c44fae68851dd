"""Pipeline stages of about equal predicted time: where to cut the layers of a model.

In: microseconds of each layer and of what stands before and after. Out: the first layer of each
stage, and the number of layers. The layer graph says in what order layers run and what crosses.
"""

from collections.abc import Sequence

import networkx as nx

_HALVINGS = 48


def layer_graph(layer_us: Sequence[float], before_us: float, after_us: float) -> "nx.DiGraph":
    """A node a layer with its `us`; the first carries what stands before, the last what follows."""
    graph = nx.DiGraph()
    last = len(layer_us) - 1
    for index, us in enumerate(layer_us):
        graph.add_node(index, us=us + before_us * (index == 0) + after_us * (index == last))
    graph.add_edges_from((index, index + 1) for index in range(last))
    return graph


def stage_bounds(graph: "nx.DiGraph", stages: int) -> tuple[int, ...]:
    """Bounds 0 < … < layers of `stages` runs whose longest is as short as can be.

    The longest stage is found by halving: a limit will do when filling stage after stage up to it
    needs no more than `stages` of them. Expects stages <= layers.
    """
    order = list(nx.topological_sort(graph))
    times = [graph.nodes[node]["us"] for node in order]
    low, high = max(times), sum(times)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_fill(times, middle, stages)) <= stages else (middle, high)
    return (*_even(times, high, stages), len(times))


def _even(times: Sequence[float], limit: float, stages: int) -> tuple[int, ...]:
    """First layers of stages as even as the limit allows: each near the mean of what is left."""
    starts, at = [0], 0
    for left in range(stages, 1, -1):
        mean, total, end = sum(times[at:]) / left, times[at], at + 1
        most = len(times) - (left - 1)
        while end < most and total + times[end] / 2 <= mean and total + times[end] <= limit:
            total += times[end]
            end += 1
        while len(_fill(times[end:], limit, left - 1)) > left - 1 and end < most:
            end += 1
        starts.append(end)
        at = end
    return tuple(starts)


def _fill(times: Sequence[float], limit: float, stages: int) -> tuple[int, ...]:
    """First layers when each stage takes what fits; a stage never takes layers others lack."""
    starts, total = [0], 0.0
    for index, us in enumerate(times):
        left = len(times) - index  # layers that are to be placed, this one included
        owed = stages - len(starts)  # stages that have none yet
        if index > starts[-1] and (total + us > limit * (1 + 1e-12) or left <= owed):
            starts.append(index)
            total = 0.0
        total += us
    return tuple(starts)
