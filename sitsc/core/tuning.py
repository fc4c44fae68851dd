"""What is to be measured on a GPU: kernels of linear layers with their tiles, built without one.

`sitsc tune build` writes a `TuneSet` beside the kernels, `sitsc tune run` reads it where the GPU
is. Sizes of partial sums (fp32) and counters (int32) are counts of elements.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sitsc.core.canonical import canonical_json
from sitsc.core.errors import ArtifactError, PlanError
from sitsc.core.records import from_value, to_value

TUNE, SCHEMA = "tune.json", 1
MOST_TOKENS = 64
_CLASSES = ((1, 1), (2, 2), (3, 16), (17, 32), (33, MOST_TOKENS))  # what one tile can serve


@dataclass(frozen=True, slots=True)
class TuneCase:
    """A kernel on a grid, for a layer of this shape and so many tokens.

    `kernel` and `tile` are what a `TileEntry` would say; `current` marks what the compiler takes
    today. Names and types of the arguments lie in the metadata of kernel `key`.
    """

    shape: dict[str, Any]
    tokens: int
    kernel: str
    tile: dict[str, int]
    current: bool
    key: str
    grid: tuple[int, ...]
    partials: int
    counters: int

    def name(self) -> str:
        """Layer, tokens and tile in a few words."""
        tile = " ".join(f"{name}={value}" for name, value in self.tile.items())
        return f"{shape_name(self.shape)} × {self.tokens}: {self.kernel} {tile}"


@dataclass(frozen=True, slots=True)
class TuneSet:
    """All cases of a model for one target, likeliest first for each shape and token count."""

    schema: int
    target: str
    sm: int
    cases: tuple[TuneCase, ...]

    def groups(self) -> list[tuple[TuneCase, ...]]:
        """The cases of each shape and token count, in their order."""
        found: dict[str, list[TuneCase]] = {}
        for case in self.cases:
            found.setdefault(f"{case.shape} {case.tokens}", []).append(case)
        return [tuple(cases) for cases in found.values()]


def shape_name(shape: dict[str, Any]) -> str:
    """A layer in a few words: norm+glu 14336×4096."""
    parts = ["norm"] if shape["norm"] else []
    parts += [shape["epilogue"]] if shape["epilogue"] != "store" else []
    parts += [shape["out_dtype"]] if shape["out_dtype"] != "bf16" else []
    return f"{'+'.join(parts) or 'plain'} {shape['rows']}×{shape['columns']}"


def write_tune_set(made: TuneSet, folder: Path) -> None:
    """Write tune.json, the last file of a folder."""
    (folder / TUNE).write_text(canonical_json(to_value(made)))


def read_tune_set(folder: Path) -> TuneSet:
    """The set in a folder. Raises ArtifactError for one that is missing or cannot be read."""
    try:
        found = from_value(TuneSet, json.loads((folder / TUNE).read_text()), TUNE)
    except (OSError, ValueError, PlanError) as error:
        raise ArtifactError(
            f"no kernels to measure: {error}",
            where=str(folder),
            hint="sitsc tune build writes them",
        ) from None
    if found.schema != SCHEMA:
        raise ArtifactError(
            f"{TUNE} has schema {found.schema}, not {SCHEMA}", hint="build it again"
        )
    return found


def token_range(tokens: int, measured: tuple[int, ...], kernel: str) -> tuple[int, int]:
    """The token counts, both ends included, that a choice measured at `tokens` holds for.

    Up to the next class of tiles or the next measured count, whichever comes first; a gemv is
    made for an exact count and holds for no larger one.
    """
    low, high = next(pair for pair in _CLASSES if tokens <= pair[1])
    low = max([low, *(count + 1 for count in measured if count < tokens)])
    if kernel.startswith("gemv") or any(tokens < count <= high for count in measured):
        high = tokens
    return low, high
