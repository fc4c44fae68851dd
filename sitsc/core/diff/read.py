"""Opens the plans that are compared: artifacts and plan files, told apart from damaged ones.

In: a folder or a file. Out: `Opened`. A plan of another schema is read section by section, and what
cannot be read is named. Raises SitscError for what was cut off or edited by hand.
"""

import json
import math
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_type_hints

from sitsc.core import plan_file
from sitsc.core.artifact import open_artifact
from sitsc.core.canonical import sha256_hex
from sitsc.core.diff.change import Side
from sitsc.core.diff.view import programs
from sitsc.core.errors import ArtifactError, PlanError, VerifyError
from sitsc.core.plan import PLAIN, SCHEMA, Plan, read_plan
from sitsc.core.records import from_value

_EDITED = "compile again; plans are compared as sitsc wrote them"


@dataclass(frozen=True, slots=True)
class Opened:
    """A plan, its side of the comparison, and the sections that could not be read, with why.

    Where `unread` names sections, they are None in `plan`.
    """

    plan: Plan
    side: Side
    schema: int = SCHEMA
    unread: dict[str, str] = field(default_factory=dict)


def open_plan(place: Path) -> Opened:
    """The plan of an artifact or of a file. Raises SitscError."""
    if place.is_dir() or not place.exists():
        try:
            artifact = open_artifact(place)
        except VerifyError as error:  # 1 says that a comparison was made
            raise ArtifactError(error.what, where=error.where, hint=error.hint) from None
        return _opened(artifact.plan, place.resolve().name, artifact.manifest.plan)
    return read_text(plan_file.read_text(place), place.name)


def read_text(text: str, name: str) -> Opened:
    """The plan of a text called `name`. Raises PlanError."""
    schema = _schema(text, name)
    if schema != SCHEMA:
        return _partly(json.loads(text), schema, name, text)
    plan = _whole(text, name)
    canonical = plan.text()
    if text != canonical:
        line = _first_difference(text, canonical)
        what = f"not as sitsc writes it, from line {line} on: edited by hand?"
        raise PlanError(what, where=name, hint=_EDITED)
    if what := _inconsistent(plan):
        raise PlanError(f"{what}: edited by hand?", where=name, hint=_EDITED)
    return _opened(plan, name, sha256_hex(text.encode()))


def opened(plan: Plan, name: str) -> Opened:
    """A plan that was just made, with the digits that its text has."""
    return read_text(plan.text(), name)


def _opened(plan: Plan, name: str, digest: str) -> Opened:
    return Opened(plan, Side(name, digest, plan.runs(), _model(plan), plan.target.name))


def _whole(text: str, name: str) -> Plan:
    """The plan of a text. Raises PlanError that names the file too."""
    try:
        return read_plan(text, name)
    except PlanError as error:
        where = ", ".join(dict.fromkeys((name, error.where)))
        raise PlanError(error.what, where=where, hint=error.hint or _EDITED) from None


def _first_difference(text: str, other: str) -> int:
    """The number of the first line that differs."""
    pairs = zip_longest(text.splitlines(), other.splitlines())
    return next((number for number, (x, y) in enumerate(pairs, 1) if x != y), 1)


def _schema(text: str, name: str) -> int:
    """The schema that a text names. Raises PlanError for what is no plan."""
    try:
        value = json.loads(text, parse_constant=_no_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        hint = "the file is damaged or cut off"
        raise PlanError(f"not JSON: {error}", where=name, hint=hint) from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or "regimes" not in value:
        hint = "give an artifact or a plan.json"
        raise PlanError("no plan in this file", where=name, hint=hint)
    return schema


def _no_number(text: str) -> float:
    """Raises ValueError: no plan holds what Python alone calls a number."""
    raise ValueError(f"{text} is no number")


def _number(text: str) -> float:
    """Raises ValueError for what is larger than a number can be."""
    return value if math.isfinite(value := float(text)) else _no_number(text)


def _partly(value: dict[str, Any], schema: int, name: str, text: str) -> Opened:
    """What of a plan of another schema can be read. Raises PlanError when nothing can."""
    hints = get_type_hints(Plan)
    read: dict[str, Any] = {"schema": schema}
    unread: dict[str, str] = {}
    for item in fields(Plan):
        if item.name == "schema":
            continue
        try:
            read[item.name] = from_value(hints[item.name], value[item.name], item.name)
        except KeyError:
            unread[item.name] = "missing"
        except PlanError as error:
            unread[item.name] = f"{error.what} at {error.where}"
    if len(read) == 1:
        raise PlanError(
            f"plan schema {schema}, this version reads {SCHEMA}, and no section of it is alike",
            where=name,
            hint="compile again, or use the version that wrote it",
        )
    plan = Plan(**(read | dict.fromkeys(unread)))  # pyright: ignore[reportArgumentType]
    model = "unknown" if {"model", "regimes"} & set(unread) else _model(plan)
    target = "unknown" if "target" in unread else plan.target.name
    side = Side(name, sha256_hex(text.encode()), "", model, target)
    return Opened(plan, side, schema, unread)


def _model(plan: Plan) -> str:
    size = plan.model.dimensions
    shape = [f"{size[key]} {word}" for key, word in _SHAPE if key in size]
    return " ".join([plan.model.architecture, *([f"({', '.join(shape)})"] if shape else [])])


_SHAPE = (("num_hidden_layers", "layers"), ("hidden_size", "wide"))


def _inconsistent(plan: Plan) -> str:
    """What of a plan contradicts itself, or nothing."""
    for program in programs(plan):
        m = program.memory
        parts = m.weights_bytes + m.arena_bytes + m.kv_bytes + m.package_bytes
        parts += m.graph_bytes + m.slack_bytes
        if parts != m.total_bytes:
            return f"memory comes to {parts} bytes, memory.total_bytes says {m.total_bytes}"
        pages = sum(m.kv_pages * group.page_bytes for group in program.kv)
        if program.kv and pages != m.kv_bytes:
            return f"KV pages come to {pages} bytes, memory.kv_bytes says {m.kv_bytes}"
    if plan.stages or plan.kind == PLAIN:
        return ""
    for regime in plan.regimes:
        kind = "tpot" if regime.kind == "decode" else "ttft"
        said = plan.predictions.get(f"{kind}_{regime.name}")
        if said is None or abs(said.value - regime.predicted_us / 1e3) > 1e-4 * said.value:
            return f"{kind}_{regime.name} is not the time of its regime"
    return ""
