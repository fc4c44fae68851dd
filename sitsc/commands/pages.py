"""HTML pages from the templates in data/pages: one style, nothing from a network.

In: the name of a template and what it shows. Out: the text of a page, the same bytes each time.
"""

import os
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from sitsc.core import stops
from sitsc.core.disk import disk_errors


def render(template: str, **values: Any) -> str:
    """The page of a template in data/pages; all values are escaped."""
    environment = Environment(
        loader=PackageLoader("sitsc", "data/pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def write_page(place: Path, text: str) -> None:
    """Write a page whole or not at all. Raises ArtifactError where the disk refuses."""
    partial = place.with_name(f".{place.name}.partial-{os.getpid()}")
    with disk_errors(place):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            stops.check()
            os.replace(partial, place)
        finally:
            partial.unlink(missing_ok=True)
