"""What of a graph must divide among ranks: heads, experts, what lies between linear layers."""

from torch import fx

from sitsc.core.parallel import Divisible
from sitsc.passes.fxutil import arguments, calls, tensor
from sitsc.passes.layers import num_layers
from sitsc.passes.shard_demand import inner_sizes
from sitsc.passes.shard_names import sizes_of


def divisible(graph: fx.Graph) -> Divisible:
    """The sizes of a graph, before its linear layers are lowered, that a partition must divide."""
    heads, experts, widths = set(), set(), inner_sizes(graph)
    for node in calls(graph, "paged_attention", "attention"):
        args = arguments(node)
        heads.add((sizes_of(args["q"])[1], sizes_of(args["k"])[1]))
    for node in calls(graph, "moe", "experts"):
        down = tensor(arguments(node)["down"])
        experts.add((int(down.shape[0]), int(down.shape[2])))
    for node in calls(graph, "glu"):
        widths.add(sizes_of(node)[-1])
    return Divisible(
        heads=tuple(sorted(heads)),
        intermediate=tuple(sorted(widths)),
        experts=tuple(sorted(experts)),
        num_layers=num_layers(graph),
    )
