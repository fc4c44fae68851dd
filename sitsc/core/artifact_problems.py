"""Everything that is wrong with an artifact, file by file, for `sitsc verify`.

Unlike opening one, it does not stop at the first problem.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sitsc.core import artifact as files
from sitsc.core.artifact import Manifest
from sitsc.core.errors import PlanError, SitscError


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: the file, and what about it."""

    file: str
    what: str


def find_problems(
    root: Path | str, progress: Callable[[float], None] = lambda share: None
) -> list[Problem]:
    """All problems, none for a whole artifact. Raises ArtifactError where there is no artifact."""
    root = files.existing(Path(root))
    try:
        manifest = files.read_manifest(root)
    except SitscError as error:
        return [Problem(files.MANIFEST, error.what)]
    altered = files.altered_files(root, manifest, progress)
    problems = [Problem(name, what) for name, what in altered.items()]
    if files.PLAN not in altered:
        problems += _plan_problems(root, manifest)
    return problems


def _plan_problems(root: Path, manifest: Manifest) -> list[Problem]:
    try:
        plan = files.read_plan_file(root)
    except PlanError as error:
        return [Problem(files.PLAN, error.what)]
    named = (manifest.plan, manifest.runs, manifest.target)
    if (plan.sha256(), plan.runs(), plan.target.name) != named:
        return [Problem(files.PLAN, "is not the plan that the manifest names")]
    return []
