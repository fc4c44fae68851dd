"""The artifact: a relocatable folder with a manifest of every file; written whole or not at all.

`ArtifactWriter` fills a temporary folder beside the target and renames it at the end. `open_artifact`
reads the manifest and the plan and refuses by name what is missing, altered or from another version.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sitsc.core.canonical import canonical_json
from sitsc.core.errors import ArtifactError, ArtifactExistsError, PlanError, TargetError
from sitsc.core.plan import Plan, read_plan
from sitsc.core.records import from_value, to_value

SCHEMA = 1
MANIFEST, PLAN, WEIGHTS, WEIGHTS_INDEX = "manifest.json", "plan.json", "weights.bin", "weights.json"
TOKENIZER, CHAT_TEMPLATE, SPECIAL = "tokenizer.json", "chat_template.jinja", "special_tokens.json"
_READ_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the artifact is, what built it, and every file in it."""

    schema: int
    target: str
    plan: str
    runs: str
    built_with: dict[str, str]
    packed: bool
    checkpoint_hint: str
    files: dict[str, FileEntry]


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Where one planned buffer lies in the weights file."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact: its folder, manifest and plan."""

    root: Path
    manifest: Manifest
    plan: Plan

    def file(self, name: str) -> Path:
        """The path of a file of the artifact; raises ArtifactError when it is not in the manifest."""
        if name not in self.manifest.files:
            raise ArtifactError(f"the artifact has no {name}", where=self.root.name)
        return self.root / name

    def has(self, name: str) -> bool:
        """Whether a file is part of the artifact."""
        return name in self.manifest.files

    def stored_weights(self) -> dict[str, StoredWeight]:
        """The index of the weights file, by buffer."""
        value = json.loads(self.file(WEIGHTS_INDEX).read_text())
        items = from_value(tuple[StoredWeight, ...], value, WEIGHTS_INDEX)
        return {item.name: item for item in items}


def hash_file(path: Path) -> FileEntry:
    """Size and checksum of a file, read in pieces."""
    state, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            state.update(piece)
            size += len(piece)
    return FileEntry(size, state.hexdigest())


class ArtifactWriter:
    """A context that collects files in a temporary folder; `finish` makes it the artifact."""

    def __init__(self, out: Path) -> None:
        self.out = Path(out)
        if self.out.exists():
            raise ArtifactExistsError(
                f"{self.out} exists already", hint="choose another -o, or remove it first"
            )
        self.root = self.out

    def __enter__(self) -> "ArtifactWriter":
        with disk_errors(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{self.out.name}.partial-"
            self.root = Path(tempfile.mkdtemp(dir=self.out.parent, prefix=prefix))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self.root != self.out:
            shutil.rmtree(self.root, ignore_errors=True)

    def path(self, name: str) -> Path:
        """Where to write a file; its folder exists."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def finish(self, plan: Plan, manifest: Manifest) -> Artifact:
        """Hash every file, write plan and manifest, and move the folder to its place."""
        with disk_errors(self.out):
            (self.root / PLAN).write_text(plan.text())
            names = [p for p in sorted(self.root.rglob("*")) if p.is_file()]
            with ThreadPoolExecutor() as pool:
                entries = list(pool.map(hash_file, names))
            files = {
                str(path.relative_to(self.root)): entry
                for path, entry in zip(names, entries, strict=True)
            }
            full = to_value(manifest) | {"files": to_value(files)}
            (self.root / MANIFEST).write_text(canonical_json(full))
            os.chmod(self.root, 0o755)
            if self.out.exists():
                raise ArtifactExistsError(f"{self.out} appeared while compiling")
            os.rename(self.root, self.out)
        self.root = self.out
        return open_artifact(self.out)


@contextlib.contextmanager
def disk_errors(out: Path) -> Iterator[None]:
    """Turn a full disk or a forbidden folder into an error for people."""
    try:
        yield
    except OSError as error:
        reasons = {errno.ENOSPC: "the disk is full", errno.EACCES: "no permission to write"}
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise ArtifactError(f"cannot write {out}: {reason}", hint="nothing was left behind") from error


def open_artifact(root: Path | str) -> Artifact:
    """Open an artifact by its manifest and plan. Raises ArtifactError or PlanError."""
    root = Path(root)
    if not (root / MANIFEST).is_file():
        what = "is not an artifact" if root.is_dir() else "does not exist"
        raise ArtifactError(f"{root} {what}", hint="give the folder that sitsc compile -o wrote")
    manifest = _read_manifest(root)
    for name, entry in manifest.files.items():
        path = root / name
        if not path.is_file():
            raise ArtifactError(f"file {name} is missing", where=root.name, hint="copy it again")
        if path.stat().st_size != entry.bytes:
            raise ArtifactError(
                f"file {name} has {path.stat().st_size} bytes, expected {entry.bytes}",
                where=root.name,
                hint="the copy is incomplete or was altered",
            )
    plan = read_plan((root / PLAN).read_text(), PLAN)
    if plan.sha256() != manifest.plan:
        raise PlanError(
            "the plan is not the one the manifest names", where=root.name, hint="it was altered"
        )
    return Artifact(root, manifest, plan)


def _read_manifest(root: Path) -> Manifest:
    try:
        value = json.loads((root / MANIFEST).read_text())
    except (ValueError, OSError) as error:
        raise ArtifactError(f"{MANIFEST} cannot be read: {error}", where=root.name) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA:
        raise ArtifactError(
            f"artifact schema {schema}, this version reads {SCHEMA}",
            where=root.name,
            hint="compile again, or use a newer sitsc",
        )
    try:
        manifest = from_value(Manifest, value, MANIFEST)
    except PlanError as error:
        raise ArtifactError(f"{MANIFEST} is damaged: {error}", where=root.name) from None
    for name in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ArtifactError(f"{MANIFEST} names a file outside: {name}", where=root.name)
    return manifest


def check_target(artifact: Artifact, wanted: str) -> None:
    """Raises TargetError when the artifact was made for another target."""
    if artifact.manifest.target != wanted:
        raise TargetError(
            f"the artifact is for {artifact.manifest.target}, this machine runs {wanted}",
            where=artifact.root.name,
            hint=f"sitsc compile … --target {wanted}",
        )


def altered_files(artifact: Artifact) -> list[str]:
    """Names of files whose bytes are not those of the manifest; reads everything."""
    names = sorted(artifact.manifest.files)
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: hash_file(artifact.root / name), names)
        return [
            name
            for name, entry in zip(names, found, strict=True)
            if entry != artifact.manifest.files[name]
        ]


def check_files(artifact: Artifact) -> None:
    """Raises ArtifactError naming the first altered file; reads everything."""
    if bad := altered_files(artifact):
        raise ArtifactError(
            f"file {bad[0]} was altered", where=artifact.root.name, hint="copy or compile it again"
        )
