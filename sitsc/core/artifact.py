"""The artifact: a relocatable folder with a manifest of every file; written whole or not at all.

`ArtifactWriter` fills a temporary folder beside the target and renames it at the end.
`open_artifact` reads manifest and plan and refuses by name what is missing, altered or newer.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from sitsc.core import stops
from sitsc.core.canonical import canonical_json, digest
from sitsc.core.disk import PARTIAL, disk_errors, remove_leftovers
from sitsc.core.errors import (
    ArtifactError,
    ArtifactExistsError,
    PlanError,
    TargetError,
    VerifyError,
)
from sitsc.core.plan import Plan, read_plan
from sitsc.core.records import from_value, to_value

SCHEMA = 1
MANIFEST, PLAN, WEIGHTS, WEIGHTS_INDEX = "manifest.json", "plan.json", "weights.bin", "weights.json"
TOKENIZER, CHAT_TEMPLATE, SPECIAL = "tokenizer.json", "chat_template.jinja", "special_tokens.json"
_READ_BYTES, _HASHERS = 1 << 20, 2  # each hasher holds one piece
AGAIN = "copy or compile it again"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the artifact is, what built it, and every file in it; `digest` covers all the rest."""

    schema: int
    target: str
    plan: str
    runs: str
    built_with: dict[str, str]
    packed: bool
    checkpoint_hint: str
    files: dict[str, FileEntry]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """Where one planned buffer lies in the weights file."""

    name: str
    offset: int
    bytes: int


def rank_files(rank: int, num_ranks: int) -> tuple[str, str]:
    """The names of a rank's weights file and of its index in an artifact for `num_ranks`."""
    if num_ranks == 1:
        return WEIGHTS, WEIGHTS_INDEX
    return f"weights_{rank}.bin", f"weights_{rank}.json"


@dataclass(frozen=True, slots=True)
class Artifact:
    """An opened artifact: its folder, manifest and plan, and the files of its weights."""

    root: Path
    manifest: Manifest
    plan: Plan
    weights: str = WEIGHTS
    weights_index: str = WEIGHTS_INDEX

    def of_rank(self, rank: int) -> "Artifact":
        """The artifact as one of its ranks sees it: the plan and the weights of that rank alone."""
        plan, count = self.plan.of_rank(rank), self.plan.num_ranks
        weights, index = rank_files(rank, count)
        others = {name for other in range(count) for name in rank_files(other, count)}
        others -= {weights, index}
        files = {name: e for name, e in self.manifest.files.items() if name not in others}
        manifest = replace(self.manifest, files=files)
        return replace(self, manifest=manifest, plan=plan, weights=weights, weights_index=index)

    def file(self, name: str) -> Path:
        """The path of a file; raises ArtifactError when the manifest does not name it."""
        if name not in self.manifest.files:
            raise ArtifactError(f"the artifact has no {name}", where=self.root.name)
        return self.root / name

    def has(self, name: str) -> bool:
        """Whether a file is part of the artifact."""
        return name in self.manifest.files

    def text(self, name: str) -> str:
        """A text file of the artifact. Raises ArtifactError."""
        try:
            return self.file(name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise self._unreadable(name, error) from None

    def json(self, name: str) -> Any:
        """The value of a JSON file of the artifact. Raises ArtifactError."""
        try:
            return json.loads(self.text(name))
        except (ValueError, RecursionError) as error:
            raise self._unreadable(name, error) from None

    def _unreadable(self, name: str, error: Exception) -> ArtifactError:
        return ArtifactError(f"{name} cannot be read: {error}", where=self.root.name, hint=AGAIN)

    def stored_weights(self) -> dict[str, StoredWeight]:
        """The index of the weights file, by buffer. Raises ArtifactError or PlanError."""
        value = self.json(self.weights_index)
        items = from_value(tuple[StoredWeight, ...], value, self.weights_index)
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
        self.out = self.root = Path(out)
        with disk_errors(self.out):
            if os.path.lexists(self.out):
                raise ArtifactExistsError(
                    f"{self.out} exists already", hint="choose another -o, or remove it first"
                )

    def __enter__(self) -> "ArtifactWriter":
        with disk_errors(self.out):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{self.out.name}{PARTIAL}"
            remove_leftovers(self.out.parent, prefix)
            self.root = Path(tempfile.mkdtemp(dir=self.out.parent, prefix=prefix))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
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
            _write_manifest(self.root, manifest)
            os.chmod(self.root, 0o755)
            if self.out.exists():
                raise ArtifactExistsError(f"{self.out} appeared while compiling")
            stops.check()
            os.rename(self.root, self.out)
        self.root = self.out
        return open_artifact(self.out)


def _write_manifest(root: Path, manifest: Manifest) -> None:
    """Write a manifest with the checksums of all files in the folder."""
    names = [p for p in sorted(root.rglob("*")) if p.is_file() and p != root / MANIFEST]
    with ThreadPoolExecutor(_HASHERS) as pool:
        entries = list(pool.map(hash_file, names))
    files = {str(p.relative_to(root)): entry for p, entry in zip(names, entries, strict=True)}
    value = to_value(manifest) | {"files": to_value(files)}
    (root / MANIFEST).write_text(canonical_json(value | {"digest": _manifest_digest(value)}))


def _manifest_digest(value: dict[str, Any]) -> str:
    return digest({key: item for key, item in value.items() if key != "digest"})


def sign(root: Path) -> None:
    """Renew all checksums of an artifact whose plan or files were edited on purpose."""
    plan = read_plan((root / PLAN).read_text(), PLAN)
    manifest = read_manifest(root)
    _write_manifest(root, replace(manifest, plan=plan.sha256(), runs=plan.runs()))


def open_artifact(root: Path | str) -> Artifact:
    """Open an artifact by its manifest and plan. Raises ArtifactError, VerifyError or PlanError."""
    root = existing(Path(root))
    manifest = read_manifest(root)
    for name, entry in manifest.files.items():
        if what := size_problem(root / name, entry):
            raise VerifyError(f"file {name} {what}", where=root.name, hint="copy it again, whole")
    if PLAN not in manifest.files or hash_file(root / PLAN) != manifest.files[PLAN]:
        raise VerifyError(f"file {PLAN} was altered", where=root.name, hint=AGAIN)
    plan = read_plan_file(root)
    if plan.sha256() != manifest.plan:
        raise VerifyError(f"{MANIFEST} names another plan", where=root.name, hint=AGAIN)
    return Artifact(root, manifest, plan)


def existing(root: Path) -> Path:
    """The folder, when it is a finished artifact by its looks. Raises ArtifactError."""
    if PARTIAL in root.resolve().name:
        raise ArtifactError(f"{root} is what an interrupted compile left", hint="remove it")
    if not (root / MANIFEST).is_file():
        what = "is not an artifact" if root.exists() else "does not exist"
        raise ArtifactError(f"{root} {what}", hint="give the folder that sitsc compile -o wrote")
    return root


def size_problem(path: Path, entry: FileEntry) -> str:
    """What is wrong with the size of a file, or nothing."""
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    return "" if size == entry.bytes else f"has {size} bytes, expected {entry.bytes}"


def read_plan_file(root: Path) -> Plan:
    """The plan of an artifact folder. Raises PlanError."""
    try:
        return read_plan((root / PLAN).read_text(encoding="utf-8"), PLAN)
    except (UnicodeDecodeError, OSError) as error:
        raise PlanError(f"{PLAN} cannot be read: {error}", where=root.name, hint=AGAIN) from None


def read_manifest(root: Path) -> Manifest:
    """The manifest of a folder. Raises VerifyError, or ArtifactError for another schema."""
    try:
        text = (root / MANIFEST).read_text(encoding="utf-8")
        value = json.loads(text)
    except (ValueError, OSError, RecursionError) as error:
        raise VerifyError(
            f"{MANIFEST} cannot be read: {error}", where=root.name, hint=AGAIN
        ) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, int):
        what = f"{MANIFEST} is damaged: it names no schema"
        raise VerifyError(what, where=root.name, hint=AGAIN)
    if schema != SCHEMA:
        raise ArtifactError(
            f"artifact schema {schema}, this version reads {SCHEMA}",
            where=root.name,
            hint="compile again, or use a newer sitsc",
        )
    try:
        manifest = from_value(Manifest, value, MANIFEST)
    except PlanError as error:
        raise VerifyError(f"{MANIFEST} is damaged: {error}", where=root.name, hint=AGAIN) from None
    if text != canonical_json(value) or manifest.digest != _manifest_digest(value):
        raise VerifyError(f"{MANIFEST} was altered", where=root.name, hint=AGAIN)
    for name in manifest.files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise VerifyError(f"{MANIFEST} names a file outside: {name}", where=root.name)
    return manifest


def check_target(artifact: Artifact, wanted: str) -> None:
    """Raises TargetError when the artifact was made for another target."""
    if artifact.manifest.target != wanted:
        raise TargetError(
            f"the artifact is for {artifact.manifest.target}, this machine runs {wanted}",
            where=artifact.root.name,
            hint=f"sitsc compile … --target {wanted}",
        )


def altered_files(
    root: Path, manifest: Manifest, progress: Callable[[float], None] = lambda share: None
) -> dict[str, str]:
    """What is wrong with which file of the manifest; reads everything that is there."""
    whole = max(1, sum(entry.bytes for entry in manifest.files.values()))
    found, done = {}, 0
    with ThreadPoolExecutor(_HASHERS) as pool:
        checks = pool.map(lambda item: _problem(root / item[0], item[1]), manifest.files.items())
        for (name, entry), what in zip(manifest.files.items(), checks, strict=True):
            if what:
                found[name] = what
            done += entry.bytes
            progress(done / whole)
    return found


def _problem(path: Path, entry: FileEntry) -> str:
    """What is wrong with a file, or nothing."""
    if what := size_problem(path, entry):
        return what
    return "" if hash_file(path) == entry else "has other bytes than it was written with"


def check_files(artifact: Artifact) -> None:
    """Raises VerifyError naming the first altered file; reads everything."""
    for name, what in altered_files(artifact.root, artifact.manifest).items():
        raise VerifyError(f"file {name} {what}", where=artifact.root.name, hint=AGAIN)
