"""The data files of links that were measured elsewhere or come from datasheets.

`python bench/links.py` writes sitsc/data/links: fits of the points in bench/data/links.json, and
shares of datasheets for links that nobody has measured. `sitsc tune links` measures on a machine.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sitsc.core.links import Algorithm, Link, fit_error, fitted, link_text

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


def from_datasheet(name: str, value: dict[str, Any]) -> Link:
    """A link of a datasheet's rate times the share of another link that was measured."""
    algorithm = Algorithm(
        latency_s=value["latency_s"],
        bytes_per_s=float(f"{value['datasheet_bytes_per_s'] * value['share']:.4g}"),
        ranks=0,
        most_ranks=0,
        most_bytes=0,
        points=(),
        source=value["source"],
    )
    return Link(name, value["title"], dict.fromkeys(value["algorithms"], algorithm), value["error"])


def main() -> None:
    """Write every file."""
    data = json.loads((ROOT / "bench" / "data" / "links.json").read_text())
    for name, value in data.items():
        link = (from_datasheet if "share" in value else from_points)(name, value)
        (ROOT / "sitsc" / "data" / "links" / f"{name}.json").write_text(link_text(link))
        for key, a in link.algorithms.items():
            print(f"{name:12} {key:14} {1e6 * a.latency_s:8.2f} µs {a.bytes_per_s / 1e9:8.2f} GB/s")
        print(f"{name:12} error {link.error}")


if __name__ == "__main__":
    main()
