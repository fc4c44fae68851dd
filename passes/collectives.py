"""Time of collectives: latency and bytes over bandwidth, by the algorithms that are executed.

In: a topology of links, the number of ranks, bytes. Out: seconds' worth in microseconds and the
algorithm taken, the fastest of those that the links of the topology have: for a target's devices
what its runtime executes, in an ideal topology all that links allow. There groups larger than a
node go in two levels: inside of nodes, then between them.
"""

import math
from dataclasses import dataclass, replace

from sitsc.core.errors import OptionError
from sitsc.core.hardware import TargetData
from sitsc.core.links import (
    BETWEEN,
    GATHER,
    REDUCE,
    SEND,
    TO_ALL,
    Link,
    executed,
    load_link,
    seconds,
)

_FEW_ROWS = 16  # up to so many rows GPUs send sums as float32: what counts there is latency
_NARROW = 64  # so do rows of fewer elements, which are squares of a norm
SUM_BYTES = 2  # of an element of a sum of many rows, and as records count it
IDEAL = ", hypothetical: the best collectives that links allow, which nothing executes"


@dataclass(frozen=True, slots=True)
class Topology:
    """Devices of a node, the link inside of it, and the link between nodes.

    `ideal` where links have more algorithms than the runtime.
    """

    per_node: int
    inside: Link
    between: Link | None
    ideal: bool = True

    def text(self) -> str:
        """ "8 a node by nvlink, nodes by infiniband"."""
        text = f"one node, {self.inside.name}"
        if self.between is not None:
            text = f"{self.per_node} a node by {self.inside.name}, nodes by {self.between.name}"
        return text + IDEAL * self.ideal


@dataclass(frozen=True, slots=True)
class Transfer:
    """Microseconds of a collective and the algorithm that takes them."""

    us: float
    algorithm: str


NOTHING = Transfer(0.0, "none")


def topology(devices: int, nodes: int, link: str, between: str) -> Topology:
    """`devices` on `nodes` alike, with every algorithm that the links allow.

    Raises OptionError when they do not divide, or for a link.
    """
    if devices < 1 or nodes < 1:
        raise OptionError(f"{devices} devices on {nodes} nodes", hint="at least one of each")
    if devices % nodes:
        fits = [n for n in range(1, devices + 1) if devices % n == 0]
        near = min(fits, key=lambda n: abs(n - nodes))
        raise OptionError(
            f"{devices} devices do not divide among {nodes} nodes",
            hint=f"--nodes {near}, or {nodes * math.ceil(devices / nodes)} devices",
        )
    inside = load_link(link)
    return Topology(devices // nodes, inside, load_link(between) if nodes > 1 else None)


def topology_of(
    data: TargetData,
    devices: int,
    nodes: int = 1,
    link: str = "",
    between: str = "",
    *,
    ideal: bool = False,
) -> Topology:
    """Devices of a target on nodes alike, by its own link unless another is named.

    Inside of a node with the algorithms that are executed there, unless `ideal`; nothing is
    executed between nodes. Raises OptionError when they do not divide, or for a link.
    """
    usual = data.host.link
    found = topology(devices, nodes, link or usual, between or BETWEEN)
    if ideal:
        return found
    own = load_link(usual) if link.endswith(".json") else None
    inside = executed(found.inside, data.host.collectives, own)
    return replace(found, inside=inside, ideal=False)


def sum_itemsize(rows: int, columns: int, dtype: str) -> int:
    """Bytes of an element of a sum on its way between GPUs, for partial sums of `dtype`."""
    return 4 if dtype == "float32" and (rows <= _FEW_ROWS or columns < _NARROW) else 2


def all_reduce(nbytes: float, ranks: int, where: Topology) -> Transfer:
    """The sum of `nbytes` of each of `ranks` on all of them."""
    return _collective(REDUCE, nbytes, ranks, where)


def all_gather(nbytes: float, ranks: int, where: Topology) -> Transfer:
    """A result of `nbytes`, of which every rank has a share, on all of them."""
    return _collective(GATHER, nbytes, ranks, where)


def all_to_all(nbytes: float, ranks: int, where: Topology) -> Transfer:
    """Every rank sends `nbytes`, an even share to each rank."""
    return _collective(TO_ALL, nbytes, ranks, where)


def send(nbytes: float, where: Topology, *, across: bool) -> Transfer:
    """`nbytes` from one device to another, of the same node or `across`."""
    link = where.between if across and where.between is not None else where.inside
    return _fastest(SEND, nbytes, 2, link)


def _collective(names: tuple[str, ...], nbytes: float, ranks: int, where: Topology) -> Transfer:
    if ranks <= 1 or nbytes <= 0:
        return NOTHING
    if ranks <= where.per_node or where.between is None:
        return _fastest(names, nbytes, ranks, where.inside)
    nodes, inside = math.ceil(ranks / where.per_node), where.per_node
    if inside == 1:
        return _fastest(names, nbytes, nodes, where.between)
    return _two_levels(names, nbytes, nodes, inside, where, where.between)


def _two_levels(
    names: tuple[str, ...], nbytes: float, nodes: int, inside: int, where: Topology, link: Link
) -> Transfer:
    """Each device of a node carries its share between nodes; the rest stays inside.

    A sum: scattered inside (as much as gathering), summed between nodes, gathered inside.
    """
    flat = _fastest(names, nbytes, nodes * inside, link)
    outer = _fastest(names, nbytes / inside, nodes, link)
    if names is REDUCE:
        inner = _fastest(GATHER, nbytes, inside, where.inside)
        us = 2 * inner.us + outer.us
    elif names is GATHER:
        inner = _fastest(names, nbytes, inside, where.inside)
        us = inner.us + outer.us
    else:
        inner = _fastest(names, nbytes, inside, where.inside)
        outer = _fastest(names, nbytes, nodes, link)
        us = inner.us + outer.us
    found = Transfer(us, f"{inner.algorithm} inside, {outer.algorithm} between")
    return min(found, flat, key=lambda t: t.us)


def _fastest(names: tuple[str, ...], nbytes: float, ranks: int, link: Link) -> Transfer:
    found = []
    for name in names:
        algorithm = link.algorithms.get(name)
        if algorithm is None or 0 < algorithm.most_ranks < ranks:
            continue
        if 0 < algorithm.most_bytes < nbytes:
            continue
        found.append(Transfer(1e6 * seconds(algorithm, name, nbytes, ranks), name))
    if not found:
        raise OptionError(
            f"the link {link.name} has no {' or '.join(names)} for {ranks} ranks",
            hint="measure it with sitsc tune links",
        )
    return min(found, key=lambda t: t.us)
