"""What was measured of a plan: `actual.json`, the counterpart of its predictions.

In: figures of `sitsc bench`. Out: `Actual`, canonical JSON without any path, beside the artifact
(`model.sitsc` → `model.sitsc.actual.json`) and never in it: an artifact is checksummed, may lie on
a disk that cannot be written, and may be measured on several machines. docs/plan.md tells the
format.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sitsc.core.canonical import canonical_json
from sitsc.core.disk import disk_errors
from sitsc.core.errors import PlanError
from sitsc.core.records import from_value, to_value

SCHEMA = 1
TPOT, TTFT, START = "tpot", "ttft", "cold_start"
_SUFFIX = ".actual.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: `kind` is "tpot" or "ttft" (ms) or "cold_start" (s).

    `key` names it among the results ("bs8_ctx128"). TPOT is of `sequences` with `context` tokens
    each on average, TTFT of a prompt of `tokens`; a start read `weights_bytes` from the disk.
    """

    key: str
    kind: str
    value: float
    sequences: int = 0
    context: float = 0.0
    tokens: int = 0
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """The most bytes that were in use, of those that the plan has for a device."""

    peak_bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredKernels:
    """µs of each kernel class (template, or "library") in one decode step of a measured row."""

    key: str
    sequences: int
    context: float
    us: dict[str, float]


@dataclass(frozen=True, slots=True)
class Actual:
    """All that was measured of one plan on one machine.

    `plan` and `runs` are its digests; `runs` is "" where only the first is known.
    """

    schema: int
    plan: str
    runs: str
    model: str
    target: str
    hardware: str
    versions: dict[str, str]
    commit: str
    date: str
    points: tuple[Measured, ...]
    memory: MeasuredMemory | None
    kernels: tuple[MeasuredKernels, ...]

    def text(self) -> str:
        """The canonical text."""
        return canonical_json(to_value(self))


def actual_of(
    facts: dict[str, Any],
    *,
    digests: tuple[str, str],
    model: str,
    target: str,
    points: Iterable[Measured],
    memory: MeasuredMemory | None,
) -> Actual:
    """Measurements on the machine and the day of `facts`; `digests` are `plan` and `runs`."""
    return Actual(
        schema=SCHEMA,
        plan=digests[0],
        runs=digests[1],
        model=model,
        target=target,
        hardware=facts["hardware"],
        versions=facts["versions"],
        commit=facts["commit"],
        date=facts["date"],
        points=tuple(points),
        memory=memory,
        kernels=(),
    )


def actual_place(artifact: Path) -> Path:
    """Where the measurements of an artifact lie: beside its folder."""
    root = artifact.resolve()
    return root.with_name(root.name + _SUFFIX)


def write_actual(actual: Actual, path: Path) -> None:
    """Write measurements in place of earlier ones. Raises SitscError when the disk does not."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(actual.text())


def keep_actual(actual: Actual, path: Path) -> Path:
    """Write measurements; those there of the same plan, machine and commit stay beside them.

    A figure that was measured again replaces the one before. Raises SitscError when the disk fails.
    """
    try:
        before = read_actual(path)
    except PlanError:
        before = None
    if before is not None and _circumstances(before) == _circumstances(actual):
        actual = _joined(before, actual)
    write_actual(actual, path)
    return path


def _circumstances(actual: Actual) -> tuple[Any, ...]:
    return actual.runs, actual.plan, actual.hardware, actual.versions, actual.commit


def _joined(before: Actual, actual: Actual) -> Actual:
    points = {point.key: point for point in (*before.points, *actual.points)}
    kernels = {row.key: row for row in (*before.kernels, *actual.kernels)}
    memories = [one.memory for one in (before, actual) if one.memory is not None]
    return replace(
        actual,
        points=tuple(points.values()),
        memory=max(memories, key=lambda memory: memory.peak_bytes, default=None),
        kernels=tuple(kernels.values()),
    )


def read_actual(path: Path) -> Actual:
    """Measurements of an actual.json, or of a results file of `sitsc bench` for a GPU.

    Raises PlanError for what is neither.
    """
    hint = "measure with sitsc bench"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"no measurements: {error}", where=path.name, hint=hint) from None
    if not isinstance(value, dict) or not ({"points", "sitsc"} & set(value)):
        raise PlanError("no measurements in this file", where=path.name, hint=hint)
    if "points" not in value:
        return actual_of_report(value, where=path.name)
    if value.get("schema") != SCHEMA:
        what = f"measurements of schema {value.get('schema')}, this version reads {SCHEMA}"
        raise PlanError(what, where=path.name, hint=hint)
    found = from_value(Actual, value, path.name)
    _check(found, path.name)
    return found


def _check(actual: Actual, where: str) -> None:
    """Raises PlanError for sizes that no step has, and for what no clock says."""
    wrong = [point.key for point in actual.points if not _possible(point)]
    wrong += [
        row.key
        for row in actual.kernels
        if row.sequences < 1
        or not 0 <= row.context < math.inf
        or not all(0 <= us < math.inf for us in row.us.values())
    ]
    if actual.memory is not None and actual.memory.peak_bytes < 1:
        wrong.append("memory")
    for key in wrong:
        raise PlanError(f"{key!r} is no measurement", where=where, hint="bench again")


def _possible(point: Measured) -> bool:
    sizes = {TPOT: point.sequences, TTFT: point.tokens, START: 1}.get(point.kind, 0)
    return sizes >= 1 and 0 < point.value < math.inf and 0 <= point.context < math.inf


def actual_of_report(report: dict[str, Any], runs: str = "", where: str = "results") -> Actual:
    """The measurements of a results file for a GPU (sitsc/commands/bench_report.py).

    Raises PlanError for a file that lacks something.
    """
    try:
        model, detail = report["model"], report["detail"]
        rows = report["sitsc"][model]
        memory = detail.get("memory")
        points = [_row(key, value, detail) for key, value in rows.items()]
        found = Actual(
            schema=SCHEMA,
            plan=report["plan"],
            runs=runs,
            model=model,
            target=report["target"],
            hardware=report["hardware"],
            versions=report["versions"] | _drivers(report),
            commit=report["commit"],
            date=report["date"],
            points=tuple(point for point in points if point is not None),
            memory=memory and MeasuredMemory(memory["peak_bytes"], memory["planned_bytes"]),
            kernels=tuple(
                MeasuredKernels(key, detail[key]["batch"], detail[key]["mean_context"], us)
                for key, us in report.get("kernels_us", {}).items()
            ),
        )
        _check(found, where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        lacks = isinstance(error, KeyError)
        what = f"not the results of a GPU: {error}{' is missing' if lacks else ''}"
        raise PlanError(what, where=where, hint="measure again with sitsc bench") from None
    return found


def _row(key: str, value: float, detail: dict[str, Any]) -> Measured | None:
    """A row of results; None for a kind that nothing predicts."""
    if key.startswith("bs"):
        row = detail[key]
        return Measured(key, TPOT, value, sequences=row["batch"], context=row["mean_context"])
    if key.startswith("ttft_"):
        return Measured(key, TTFT, value, tokens=int(key.removeprefix("ttft_")))
    if key == "start_s":
        start = detail["start"]  # what was read beside the rest, unless weights were drawn
        read = start["weights_bytes"] if start.get("beside_s", {}).get("weights") else 0
        return Measured(key, START, value, weights_bytes=read)
    return None


def _drivers(report: dict[str, Any]) -> dict[str, str]:
    return {name: str(report[name]) for name in ("driver", "cuda") if report.get(name)}
