"""Plans in files of their own: the canonical text, compressed where the name ends in `.xz`.

Plans repeat themselves: of 0.5 MB of text 12 KB are left. What is compared is always the text, so
that another version of the library may compress otherwise.
"""

import lzma
import os
from pathlib import Path

from sitsc.core import stops
from sitsc.core.disk import disk_errors
from sitsc.core.errors import PlanError

PLAIN, COMPRESSED = ".json", ".json.xz"
SUMMARY = ".txt"  # beside a plan: what it says; alone: why there is none
NO_PLAN = "no plan: "
_MOST_BYTES = 1 << 28
# Long matches found quickly: as small as the best preset, in a third of its time.
_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 24, "nice_len": 273, "depth": 16}
]
_HINT = "give an artifact, a plan.json or a .json.xz"


def read_text(place: Path) -> str:
    """The text of a plan file. Raises PlanError for what cannot be read."""
    try:
        raw = place.read_bytes()
        return (_unpacked(raw, place) if place.name.endswith(".xz") else raw).decode()
    except (UnicodeDecodeError, OSError) as error:
        raise PlanError(f"{place} cannot be read: {error}", hint=_HINT) from None
    except lzma.LZMAError as error:
        hint = "the file is damaged or cut off"
        raise PlanError(f"not compressed by xz: {error}", where=place.name, hint=hint) from None


def _unpacked(raw: bytes, place: Path) -> bytes:
    """Raises LZMAError for what is no whole stream, PlanError for what is far too large."""
    stream = lzma.LZMADecompressor()
    text = stream.decompress(raw, _MOST_BYTES)
    if not stream.eof:
        if len(text) == _MOST_BYTES:
            raise PlanError(f"more than {_MOST_BYTES} bytes", where=place.name, hint=_HINT)
        raise lzma.LZMAError("it ends too early")
    return text


def write_text(place: Path, text: str) -> bool:
    """Write a file whole or not at all, unless it holds that text; whether it was written.

    Raises ArtifactError where the disk refuses.
    """
    if place.is_file():
        try:
            if read_text(place) == text:
                return False
        except PlanError:
            pass  # damaged: written anew
    raw = text.encode()
    if place.name.endswith(".xz"):
        raw = lzma.compress(raw, filters=_FILTERS)
    partial = place.with_name(f".{place.name}.partial-{os.getpid()}")
    with disk_errors(place):
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(raw)
            stops.check()
            os.replace(partial, place)
        finally:
            partial.unlink(missing_ok=True)
    return True
