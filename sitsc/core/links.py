"""Links between devices: latency and bandwidth of each algorithm, fitted to measured points.

In: data/links/<name>.json, or points that `sitsc tune links` measured. Out: a `Link`. An algorithm
is two numbers: seconds a message takes however small it is, and bytes a second of one direction.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from sitsc.core.errors import OptionError, PlanError
from sitsc.core.records import from_value, to_value

BETWEEN = "infiniband"  # nodes, where nothing else is asked for
# (messages one after another, bytes of one direction over the size) of each algorithm, by ranks.
# Sizes are those of the whole result; all_to_all's is what one rank sends, its own part included.
STEPS = {
    "one_shot": lambda p: (1.0, p - 1.0),
    "two_shot": lambda p: (2.0, 2.0 * (p - 1) / p),
    "ring": lambda p: (2.0 * (p - 1), 2.0 * (p - 1) / p),
    "tree": lambda p: (2.0 * (p - 1).bit_length(), 2.0),
    "direct_gather": lambda p: (1.0, (p - 1) / p),
    "ring_gather": lambda p: (p - 1.0, (p - 1) / p),
    "direct_to_all": lambda p: (1.0, (p - 1) / p),
    "pairs_to_all": lambda p: (p - 1.0, (p - 1) / p),
    "gathered_sum": lambda p: (p - 1.0, p - 1.0),  # all values come to every rank, which adds them
    "send": lambda p: (1.0, 1.0),
    "direct_send": lambda p: (1.0, 1.0),
}
REDUCE = ("one_shot", "two_shot", "ring", "tree", "gathered_sum")
GATHER = ("direct_gather", "ring_gather")
TO_ALL = ("direct_to_all", "pairs_to_all")
SEND = ("send", "direct_send")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Seconds a message and bytes a second; `points` are (bytes, seconds) measured among `ranks`.

    `most_ranks` and `most_bytes` say where an implementation ends; 0 where it does not.
    """

    latency_s: float
    bytes_per_s: float
    ranks: int
    most_ranks: int
    most_bytes: int
    points: tuple[tuple[int, float], ...]
    source: str


@dataclass(frozen=True, slots=True)
class Link:
    """One kind of link; `error` is the relative error of its times where they were measured."""

    name: str
    title: str
    algorithms: dict[str, Algorithm]
    error: float


def link_names() -> list[str]:
    """Names of the links that have a data file."""
    folder = resources.files("sitsc").joinpath("data/links")
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".json"))


def load_link(name: str) -> Link:
    """The link `name`, or that of a file that `sitsc tune links` wrote. Raises OptionError."""
    if name.endswith(".json"):
        try:
            return read_link(Path(name).read_text(encoding="utf-8"), name)
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"no link: {error}", hint="a file of sitsc tune links") from None
    if name not in link_names():
        known = ", ".join(link_names())
        raise OptionError(
            f"unknown link {name!r}", hint=f"one of: {known}, or a file of sitsc tune links"
        )
    text = resources.files("sitsc").joinpath(f"data/links/{name}.json").read_text()
    return read_link(text, f"links/{name}")


def read_link(text: str, where: str) -> Link:
    """The link of a text. Raises PlanError naming `where`."""
    try:
        return from_value(Link, json.loads(text), where)
    except ValueError as error:
        raise PlanError(f"no link: {error}", where=where) from None


def link_text(link: Link) -> str:
    """The text of a link's file."""
    return json.dumps(to_value(link), indent=1) + "\n"


def executed(link: Link, names: Collection[str], usual: Link | None = None) -> Link:
    """A link with the algorithms `names` alone: those that a target executes.

    Those that a link of `sitsc tune links` has not measured are of `usual`. Raises OptionError for
    a link without one of them.
    """
    known = ({} if usual is None else usual.algorithms) | link.algorithms
    absent = [name for name in names if name not in known]
    if absent:
        raise OptionError(
            f"the link {link.name} has no {', '.join(absent)}, which the target executes",
            hint="another --link",
        )
    return replace(link, algorithms={name: known[name] for name in names})


def fitted(
    name: str, ranks: int, points: list[tuple[int, float]], source: str, **ends: int
) -> Algorithm:
    """The `Algorithm` whose times are nearest to points of (bytes, seconds), relatively.

    Least squares over relative errors; a latency or a time a byte below 0 counts as none.
    """
    import numpy as np  # noqa: PLC0415  (a tenth of a second, and only measuring needs it)

    steps, share = STEPS[name](ranks)
    rows = np.array([[steps / t, share * size / t] for size, t in points])
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(points)), rcond=None)[0]
    if latency <= 0:
        latency, per_byte = 0.0, _single(rows[:, 1])
    if per_byte <= 0:
        latency, per_byte = _single(rows[:, 0]), 1e-18
    return Algorithm(
        latency_s=float(f"{latency:.4g}"),
        bytes_per_s=float(f"{1 / per_byte:.4g}"),
        ranks=ranks,
        most_ranks=ends.get("most_ranks", 0),
        most_bytes=ends.get("most_bytes", 0),
        points=tuple((size, float(f"{t:.4g}")) for size, t in points),
        source=source,
    )


def _single(column: Any) -> float:
    return float(column.sum() / (column**2).sum())


def seconds(algorithm: Algorithm, name: str, nbytes: float, ranks: int) -> float:
    """The time of one collective by the model."""
    steps, share = STEPS[name](ranks)
    return steps * algorithm.latency_s + share * nbytes / algorithm.bytes_per_s


def fit_error(algorithms: dict[str, Algorithm]) -> float:
    """The median relative error over all measured points; 0.3 where nothing was measured."""
    errors = [
        abs(seconds(a, name, size, a.ranks) / t - 1)
        for name, a in algorithms.items()
        for size, t in a.points
    ]
    return float(f"{median(errors):.3g}") if errors else 0.3


def completed(measured: Link, usual: Link) -> Link:
    """What was measured, with the algorithms of `usual` that were not."""
    algorithms = measured.algorithms | {
        name: a for name, a in usual.algorithms.items() if name not in measured.algorithms
    }
    return replace(measured, algorithms=algorithms, error=fit_error(algorithms))


ALGORITHM_OF = {
    "all_reduce": "ring",
    "all_gather": "ring_gather",
    "all_to_all": "pairs_to_all",
    "send": "send",
}
_ADDED = "; a sum takes the gather of the values of all ranks, adding them aside"


def measured_link(
    name: str, title: str, ranks: int, points: list[tuple[str, int, float]], source: str
) -> Link:
    """The link of points (collective, bytes, seconds) among `ranks`, fitted."""
    algorithms = {}
    for collective, algorithm in ALGORITHM_OF.items():
        mine = [(size, t) for kind, size, t in points if kind == collective]
        if mine:
            count = 2 if algorithm == "send" else ranks
            algorithms[algorithm] = fitted(algorithm, count, mine, source)
    if (gather := algorithms.get("ring_gather")) is not None:
        sums = [(size // ranks, t) for size, t in gather.points]
        algorithms["gathered_sum"] = fitted("gathered_sum", ranks, sums, source + _ADDED)
    return Link(name, title, algorithms, fit_error(algorithms))
