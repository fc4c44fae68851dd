"""The data files of links that were measured elsewhere or come from datasheets.

`python bench/links.py` writes sitsc/data/links: fits of the points in bench/data/links.json, and
shares of datasheets for links that nobody has measured. `sitsc tune links` measures on a machine.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sitsc.core.links import Algorithm, Link, fit_error, fitted, link_text

PUSHED = ("one_shot", "two_shot", "direct_gather", "direct_to_all", "direct_send")
ROOT = Path(__file__).parent.parent


def from_points(name: str, value: dict[str, Any]) -> Link:
    """A link of measured points."""
    algorithms: dict[str, Algorithm] = {
        key: fitted(
            key,
            item["ranks"],
            [(size, 1e-6 * us) for size, us in item["points_us"]],
            item["source"],
            most_ranks=item.get("most_ranks", 0),
            most_bytes=item.get("most_bytes", 0),
        )
        for key, item in value["algorithms"].items()
        if "points_us" in item
    }
    for key, item in value["algorithms"].items():
        if "like" in item:
            algorithms[key] = replace(algorithms[item["like"]], points=(), source=item["source"])
    return Link(name, value["title"], algorithms, fit_error(algorithms))


def from_datasheet(name: str, value: dict[str, Any], data: dict[str, Any]) -> Link:
    """A link of a datasheet's rate times the share of another link that was measured.

    With `like`, kernels that write to other devices reach the share that they reach on that link.
    """
    algorithm = Algorithm(
        latency_s=value["latency_s"],
        bytes_per_s=float(f"{value['datasheet_bytes_per_s'] * value['share']:.4g}"),
        ranks=0,
        most_ranks=0,
        most_bytes=0,
        points=(),
        source=value["source"],
    )
    algorithms = dict.fromkeys(value["algorithms"], algorithm)
    if "like" in value:
        algorithms |= pushed(value, data[value["like"]], value["like"])
    return Link(name, value["title"], algorithms, value["error"])


def pushed(value: dict[str, Any], measured: dict[str, Any], name: str) -> dict[str, Algorithm]:
    """Algorithms of kernels that write to other devices, scaled from a link that was measured.

    Bandwidth by the rates of the datasheets, latency by those of a message of NCCL.
    """
    known = from_points(name, measured).algorithms
    rate = value["datasheet_bytes_per_s"] / measured["datasheet_bytes_per_s"]
    later = value["latency_s"] / known["ring"].latency_s
    source = (
        f"assumed: bandwidth of {name} x {rate:.4g}, the ratio of the datasheets "
        f"({value['datasheet_bytes_per_s'] / 1e9:g} of {measured['datasheet_bytes_per_s'] / 1e9:g}"
        f" GB/s each way); latency x {later:.3g}, the ratio of NCCL's"
    )
    return {key: scaled(known[key], rate, later, source) for key in PUSHED}


def scaled(algorithm: Algorithm, rate: float, later: float, source: str) -> Algorithm:
    """An algorithm as fast as `rate` times another; its message takes `later` times as long."""
    return replace(
        algorithm,
        latency_s=float(f"{algorithm.latency_s * later:.4g}"),
        bytes_per_s=float(f"{algorithm.bytes_per_s * rate:.4g}"),
        points=(),
        source=source,
    )


def faster(name: str, value: dict[str, Any], data: dict[str, Any]) -> Link:
    """A generation of a link that was measured: bandwidths by the datasheets, the same latency."""
    of = data[value["faster"]]
    rate = value["datasheet_bytes_per_s"] / of["datasheet_bytes_per_s"]
    source = (
        f"assumed: {value['faster']} x {rate:.4g} in bandwidth, the ratio of the datasheets "
        f"({value['datasheet']}; {of['datasheet']}), and as late"
    )
    known = from_points(value["faster"], of).algorithms
    algorithms = {key: scaled(a, rate, 1.0, source) for key, a in known.items()}
    return Link(name, value["title"], algorithms, value["error"])


def made(name: str, data: dict[str, Any]) -> Link:
    """The link of an entry of the data."""
    value = data[name]
    if "faster" in value:
        return faster(name, value, data)
    return from_datasheet(name, value, data) if "share" in value else from_points(name, value)


def main() -> None:
    """Write every file."""
    data = json.loads((ROOT / "bench" / "data" / "links.json").read_text())
    for name in data:
        link = made(name, data)
        (ROOT / "sitsc" / "data" / "links" / f"{name}.json").write_text(link_text(link))
        for key, a in link.algorithms.items():
            print(f"{name:12} {key:14} {1e6 * a.latency_s:8.2f} µs {a.bytes_per_s / 1e9:8.2f} GB/s")
        print(f"{name:12} error {link.error}")


if __name__ == "__main__":
    main()
