"""What is to be measured on a GPU: decode steps with alternatives for their kernels.

`sitsc tune build` writes a `TuneSet` beside the kernels, without a GPU; `sitsc tune run` reads it
where the GPU is. A subject is a linear layer or attention, by its shape: all places of a step with
that shape take the same alternative.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sitsc.core.canonical import canonical_json
from sitsc.core.errors import ArtifactError, PlanError
from sitsc.core.plan import KvGroup, Launch
from sitsc.core.records import from_value, to_value
from sitsc.core.weights import WeightSpec

TUNE, SCHEMA = "tune.json", 2
MOST_TOKENS = 256
_CLASSES = ((1, 1), (2, 2), (3, 16), (17, 32), (33, 64), (65, 128), (129, MOST_TOKENS))


@dataclass(frozen=True, slots=True)
class TuneSubject:
    """A layer to tune: `kind` "linear" or "attention", and its shape as the planner gives it."""

    kind: str
    shape: dict[str, Any]

    def name(self) -> str:
        """The layer in a few words: norm+glu 14336×4096, attention 32/8×128."""
        shape = self.shape
        if self.kind == "attention":
            return f"attention {shape['q_heads']}/{shape['kv_heads']}×{shape['head_dim']}"
        parts = ["norm"] if shape["norm"] else []
        parts += [shape["epilogue"]] if shape["epilogue"] != "store" else []
        parts += [shape["out_dtype"]] if shape["out_dtype"] != "bf16" else []
        return f"{'+'.join(parts) or 'plain'} {shape['rows']}×{shape['columns']}"


@dataclass(frozen=True, slots=True)
class TuneCase:
    """An alternative for a subject: what a table entry would say, and what is launched then.

    `launches` are those of each place of the step, their arena arguments by name of the buffer,
    and of fixed places that are otherwise with this alternative.
    Cases of one `family` differ in their grid alone; `current` is what the compiler takes today.
    """

    subject: int
    family: int
    kernel: str
    tile: dict[str, int]
    current: bool
    launches: dict[str, tuple[Launch, ...]]


@dataclass(frozen=True, slots=True)
class TuneGroup:
    """Places of a step in order; with layers, repeated for each."""

    layers: tuple[int, ...]
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TuneChain:
    """The decode step of `tokens` sequences: `fixed` places, alternatives, bytes of buffers."""

    tokens: int
    groups: tuple[TuneGroup, ...]
    fixed: dict[str, tuple[Launch, ...]]
    buffers: dict[str, int]
    cases: tuple[TuneCase, ...]


@dataclass(frozen=True, slots=True)
class TuneSet:
    """All steps of a model for one target; `kv_pages` is how many each pool has."""

    schema: int
    target: str
    sm: int
    kv: tuple[KvGroup, ...]
    kv_pages: int
    parameters: tuple[WeightSpec, ...]
    subjects: tuple[TuneSubject, ...]
    chains: tuple[TuneChain, ...]


def write_tune_set(made: TuneSet, folder: Path) -> None:
    """Write tune.json, the last file of a folder."""
    (folder / TUNE).write_text(canonical_json(to_value(made)))


def read_tune_set(folder: Path) -> TuneSet:
    """The set in a folder. Raises ArtifactError for one that is missing or cannot be read."""
    try:
        value = json.loads((folder / TUNE).read_text())
        if isinstance(value, dict) and value.get("schema") != SCHEMA:
            raise ArtifactError(
                f"{TUNE} has schema {value.get('schema')}, not {SCHEMA}", hint="build it again"
            )
        return from_value(TuneSet, value, TUNE)
    except (OSError, ValueError, PlanError) as error:
        raise ArtifactError(
            f"no kernels to measure: {error}",
            where=str(folder),
            hint="sitsc tune build writes them",
        ) from None


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


def contexts(sequences: int) -> tuple[int, ...]:
    """Context lengths at which attention of so many sequences is measured.

    The shortest is not a multiple of what a split takes: one token more may mean one split more.
    """
    longest = min(8192, 131072 // sequences)
    return tuple(sorted({192, min(1024, longest), longest}))
