"""What a caller wants of loading an artifact, and how long each phase of it took.

Shared by the loaders of all kinds of target.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sitsc.core.artifact import Artifact
from sitsc.core.errors import ArtifactError
from sitsc.runtime.steps import LogitsExecutor, StepExecutor

AnyExecutor = LogitsExecutor | StepExecutor


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Where weights come from, whether checksums are compared, and the most memory in bytes."""

    weights: Path | None = None
    random_weights: bool = False
    verify: bool = True
    memory_limit: int | None = None
    progress: Callable[[float], None] = lambda share: None


class Timeline:
    """Seconds of each phase, which sum to the whole; `beside` holds what ran along with them."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self.beside: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """Everything since the mark before belongs to this phase."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now


class Loading(Protocol):
    """An artifact on its way to a device; its weights may still be read."""

    def finish(self, timeline: Timeline) -> AnyExecutor:
        """The executor, with all weights in place."""
        ...

    def stop(self) -> None:
        """Give up: nothing runs in the background afterwards."""
        ...


def weights_folder(artifact: Artifact, request: LoadRequest) -> Path | None:
    """The checkpoint to read, None where weights lie inside or are random. Raises ArtifactError."""
    if artifact.manifest.packed:
        for wrong, option in (
            (request.weights, "--weights"),
            (request.random_weights, "--random-weights"),
        ):
            if wrong:
                raise ArtifactError("this artifact holds its weights", hint=f"leave out {option}")
        return None
    if request.random_weights:
        if request.weights is not None:
            raise ArtifactError(
                "--weights and --random-weights exclude each other", hint="leave out one"
            )
        return None
    hint = artifact.manifest.checkpoint_hint
    place = request.weights or (Path(hint) if hint else None)
    if place is None or not place.is_dir():
        raise ArtifactError(
            "this artifact holds no weights",
            hint="name the checkpoint folder with --weights DIR, or use --random-weights",
        )
    return place
