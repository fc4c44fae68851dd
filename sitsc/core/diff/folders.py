"""Folders of plans, such as golden ones and those made anew: which belong together.

In: two folders as `sitsc plan make` writes them. Out: pairs by name. Where there is no plan but a
text beside its place, the text says why.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sitsc.core import plan_file
from sitsc.core.artifact import MANIFEST
from sitsc.core.errors import OptionError, PlanError


@dataclass(frozen=True, slots=True)
class Stored:
    """A plan of a folder, or why there is none."""

    plan: Path | None
    reason: str


@dataclass(frozen=True, slots=True)
class Pair:
    """What stands under one name in both folders; None where one has nothing of that name."""

    name: str
    a: Stored | None
    b: Stored | None


def is_folder(place: Path) -> bool:
    """Whether a place is a folder of plans, and no artifact."""
    return place.is_dir() and not (place / MANIFEST).exists() and any(_names(place))


def pairs(a: Path, b: Path) -> list[Pair]:
    """All names of two folders. Raises OptionError when one of them is none, PlanError."""
    for place, other in ((a, b), (b, a)):
        if not is_folder(place):
            what = f"{other} is a folder of plans or other JSON files, {place} is none"
            raise OptionError(what, hint="two plans or artifacts, or two of sitsc plan make")
    sides = [{name: _stored(place, name) for name in _names(place)} for place in (a, b)]
    names = sorted({*sides[0], *sides[1]})
    return [Pair(name, sides[0].get(name), sides[1].get(name)) for name in names]


def same(a: Stored, b: Stored) -> bool:
    """Whether two are the same text. Raises PlanError."""
    if a.plan is None or b.plan is None:
        return a == b
    return plan_file.read_text(a.plan) == plan_file.read_text(b.plan)


def _names(folder: Path) -> Iterator[str]:
    """Names of plans in a folder, and of texts that say why there is none."""
    found = {}
    for path in sorted(folder.iterdir()):
        for suffix in (plan_file.COMPRESSED, plan_file.PLAIN):
            if path.name.endswith(suffix) and not path.name.startswith("."):
                found[path.name.removesuffix(suffix)] = None
        if path.name.endswith(plan_file.SUMMARY) and _reason(path):
            found[path.name.removesuffix(plan_file.SUMMARY)] = None
    yield from found


def _reason(path: Path) -> str:
    """Why there is no plan, or nothing when the text is another. Raises PlanError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path.name} cannot be read: {error}", hint="make plans") from None
    return (
        text.removeprefix(plan_file.NO_PLAN).strip() if text.startswith(plan_file.NO_PLAN) else ""
    )


def _stored(folder: Path, name: str) -> Stored:
    """Raises PlanError where there are two plans, or a plan and a reason why there is none."""
    files = [folder / f"{name}{end}" for end in (plan_file.COMPRESSED, plan_file.PLAIN)]
    plans = [path for path in files if path.is_file()]
    summary = folder / f"{name}{plan_file.SUMMARY}"
    reason = _reason(summary) if summary.is_file() else ""
    if len(plans) + bool(reason) != 1:
        what = f"{name} is there twice: {', '.join(p.name for p in (*plans, summary))}"
        raise PlanError(what, where=folder.name, hint="remove the older one")
    return Stored(plans[0] if plans else None, reason)
