"""What a self-test found: one line a check, with figures; and the judgement of memory.

A finding that could not be judged (`passed` None) says why; it is neither a success nor a failure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sitsc.core.plan import Memory

SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of one thing; `note` says what is wrong, or what was not judged."""

    check: str
    name: str
    passed: bool | None
    figures: dict[str, float | int | str | bool] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes of a device in use for one artifact.

    `used` is what the device lacks compared with before loading, `peak` the most that torch's
    allocator gave out at a time plus what the driver holds beside it.
    """

    weights: int
    arena: int
    kv: int
    used: int
    peak: int


def failures(findings: Sequence[Finding]) -> list[Finding]:
    """Those that failed."""
    return [finding for finding in findings if finding.passed is False]


def summary(findings: Sequence[Finding]) -> str:
    """One line: the first failure and how many more, or that all is well."""
    failed = failures(findings)
    if not failed:
        open_ones = sum(finding.passed is None for finding in findings)
        more = f", {open_ones} not judged" if open_ones else ""
        return f"{len(findings) - open_ones} checks passed{more}"
    first = failed[0]
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"{first.check} {first.name}: {first.note or 'failed'}{more}"


def memory_findings(planned: Memory, found: DeviceBytes) -> list[Finding]:
    """Planned against allocated: each class exactly, the whole and its peak within 2 percent.

    The whole may be lower by what was set aside for graphs and slack, which are upper bounds.
    """
    findings = [
        _exact("weights", planned.weights_bytes, found.weights),
        _exact("arena", planned.arena_bytes, found.arena),
        _exact("kv", planned.kv_bytes, found.kv),
    ]
    bound = planned.graph_bytes + planned.slack_bytes + planned.package_bytes
    for name, value in (("device", found.used), ("peak", found.peak)):
        findings.append(_within(name, planned.total_bytes, value, bound))
    return findings


def _figures(planned: int, found: int) -> dict[str, float | int | str | bool]:
    share = found / planned - 1 if planned else 0.0
    return {"planned_bytes": planned, "found_bytes": found, "difference": share}


def _exact(name: str, planned: int, found: int) -> Finding:
    """Allocated as planned, up to rounding of the allocation."""
    figures = _figures(planned, found)
    good = abs(found - planned) <= SHARE * planned
    note = "" if good else f"{found} bytes are allocated, {planned} are planned"
    return Finding("memory", name, good, figures, note)


def _within(name: str, planned: int, found: int, bound: int) -> Finding:
    figures = _figures(planned, found)
    good = planned - bound - SHARE * planned <= found <= planned + SHARE * planned
    note = "" if good else f"{found} bytes are in use, {planned} are planned"
    return Finding("memory", name, good, figures, note)
