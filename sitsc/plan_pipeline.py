"""Plans alone, of many models for many targets: no code, no weights, no GPU.

In: what is wanted, from the command line or a list. Out: for each its plan, or why there is
none. A model is traced once for all of its targets.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sitsc.core.errors import OptionError, PlanError, SitscError
from sitsc.core.hardware import load_target
from sitsc.core.options import CompileOptions
from sitsc.core.plan import Plan
from sitsc.core.records import from_value, to_value
from sitsc.pipeline import Progress, inspect, plan_checkpoint

_HINT = "docs/plan-diff.md shows a list"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A plan by the name of its file, without suffix: "llama3-8b.h200x2"."""

    name: str
    model: str
    options: CompileOptions


@dataclass(frozen=True, slots=True)
class Made:
    """A plan, or why it cannot be made."""

    name: str
    plan: Plan | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Entry:
    models: tuple[str, ...]
    targets: tuple[str, ...]
    label: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _List:
    plans: tuple[_Entry, ...]


def read_list(text: str, where: str) -> list[Wanted]:
    """What a list asks for: models × targets of each entry. Raises OptionError."""
    try:
        value = tomllib.loads(text)
        entries = value.get("plans")
        if isinstance(entries, list):
            usual = {"label": "", "options": {}}
            value["plans"] = [usual | e if isinstance(e, dict) else e for e in entries]
        read = from_value(_List, value, where)
    except tomllib.TOMLDecodeError as error:
        raise OptionError(f"{where} is not TOML: {error}", hint=_HINT) from None
    except PlanError as error:
        raise OptionError(error.what, where=error.where, hint=_HINT) from None
    if not read.plans:
        raise OptionError("nothing to plan", where=where, hint=_HINT)
    found = []
    for entry in read.plans:
        _check(entry, where)
        found += wanted(entry.models, entry.targets, entry.label, entry.options)
    return _distinct(found)


def _check(entry: _Entry, where: str) -> None:
    """Raises OptionError for an entry without plans, and a label that is no part of a name."""
    for name in ("models", "targets"):
        if not getattr(entry, name):
            raise OptionError(f"plans without {name}", where=where, hint=_HINT)
    if entry.label and not re.fullmatch(r"[A-Za-z0-9_-]+", entry.label):
        hint = "letters, digits, - and _: it is part of the file's name"
        raise OptionError(f"label {entry.label!r}", where=where, hint=hint)


def wanted(
    models: Sequence[str], targets: Sequence[str], label: str, options: dict[str, Any]
) -> list[Wanted]:
    """Every model for every target. Raises OptionError for options and targets that are not."""
    found = []
    for target in targets:
        chosen = _options(target, options)
        load_target(chosen.target)
        parts = (target.replace(":", "x"), *([label] if label else ()))
        found += [Wanted(".".join((_stem(m), *parts)), m, chosen) for m in models]
    return _distinct(found)


def _distinct(found: list[Wanted]) -> list[Wanted]:
    names = [item.name for item in found]
    for name in names:
        if names.count(name) > 1:
            what = f"{name} is asked for twice"
            raise OptionError(what, hint="leave one out; in a list, give one of them a label")
    return found


def _stem(model: str) -> str:
    return Path(model).name.removesuffix(".gguf").removesuffix(".onnx")


def _options(target: str, more: dict[str, Any]) -> CompileOptions:
    """Raises OptionError for unknown names and wrong types."""
    if "target" in more:
        raise OptionError("options.target beside targets", hint="leave it out of the options")
    usual = {f.name: to_value(f.default) for f in fields(CompileOptions)}
    try:
        return from_value(CompileOptions, usual | more | {"target": target}, "options")
    except PlanError as error:
        hint = f"one of {', '.join(usual)}"
        raise OptionError(error.what, where=error.where, hint=hint) from None


def plan_model(
    folder: Path, wanted: Sequence[Wanted], progress: Sequence[Progress]
) -> Iterator[Made]:
    """The plans of the model in `folder`, one after the other, each with its own `progress`.

    Raises SitscError for a model that cannot be opened, and for faults of ours.
    """
    graphs = None
    for item, report in zip(wanted, progress, strict=True):
        checkpoint = inspect(folder, item.options)
        if graphs is None:
            from sitsc.model_graphs import ModelGraphs  # noqa: PLC0415  (the passes: seconds)

            graphs = ModelGraphs(checkpoint)
        try:
            plan = plan_checkpoint(checkpoint, item.options, report, graphs=graphs).plan
        except SitscError as error:
            if error.exit_code != SitscError.exit_code:  # a fault of the compiler
                raise
            yield Made(item.name, None, str(error))
            continue
        yield Made(item.name, plan)
