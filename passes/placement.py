"""Where ranks stand: those that share layers inside of a node, stages and replicas in order.

In: a partition and a topology. Out: why the ranks of a stage cannot stand there, with the smallest
change, and which hops from stage to stage go to another node.
"""

from sitsc.core.links import REDUCE
from sitsc.core.parallel import Partition
from sitsc.passes.collectives import Topology


def misplaced(partition: Partition, where: Topology) -> tuple[str, str] | None:
    """Why ranks of a stage could not share its layers, and the smallest change; None if they can.

    An artifact runs on one host, where its target's sums take so many ranks. An ideal topology has
    sums over whole nodes as well, by the link between them.
    """
    tp, node = partition.tp, where.per_node
    if where.between is not None and tp % node and node % tp:
        devices = partition.num_ranks
        even = [n for n in range(1, devices // tp + 1) if devices % (n * tp) == 0]
        nodes = min(even, key=lambda n: (abs(n - devices / node), -n))
        fits = ", ".join(str(n) for n in range(1, node + 1) if node % n == 0)
        return (
            f"TP {tp} does not fill nodes of {node} devices: a group would straddle two",
            f"--nodes {nodes}, or a TP that divides a node: {fits}",
        )
    most = 0 if where.ideal else most_ranks(where)
    if not 0 < most < tp:
        return None
    fits = max(n for n in range(1, most + 1) if tp % n == 0)
    if most == node and where.between is not None:
        return f"TP {tp}: a node has {node} devices", f"TP {fits}, or fewer nodes"
    return (
        f"TP {tp}: sums over ranks are executed among up to {most} devices of a host",
        f"TP {fits} and more stages",
    )


def most_ranks(where: Topology) -> int:
    """The most ranks that may share layers: of a node, and of its sums; 0 for any number."""
    sums = [a.most_ranks for name, a in where.inside.algorithms.items() if name in REDUCE]
    most = 0 if 0 in sums else max(sums, default=0)
    return min(most or where.per_node, where.per_node) if where.between is not None else most


def crossing(partition: Partition, where: Topology) -> tuple[bool, ...]:
    """Whether the hop behind each stage goes to another node; behind the last, to the first.

    Of the replica with most such hops: all are as slow as that one, at worst.
    """
    tp, pp = partition.tp, partition.pp
    if where.between is None:
        return (False,) * pp
    found = []
    for replica in range(min(partition.dp, where.per_node)):  # from then on they repeat
        nodes = [(replica * pp + stage) * tp // where.per_node for stage in range(pp)]
        after = [*nodes[1:], nodes[0]]
        found.append(tuple(a != b for a, b in zip(nodes, after, strict=True)))
    return max(found, key=sum)
