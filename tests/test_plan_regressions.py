"""Faults seeded where people make them, each planned anew and named by the first lines of the diff;
harmless changes give an empty one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sitsc import lowering
from sitsc.commands.plan_diff_view import text_lines
from sitsc.core.diff.compare import compare
from sitsc.core.diff.read import Opened, opened
from sitsc.pipeline import inspect, plan_checkpoint
from tests.plan_faults import FAULTS, Fault, Subject, run_once, trace_once
from tests.plan_harmless import HARMLESS

Planned = Callable[[Subject], Opened]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("regressions")


@pytest.fixture
def anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Plans a subject with the code and data as they are now."""
    monkeypatch.setattr(lowering, "trace", trace_once)
    monkeypatch.setattr(lowering, "run_passes", run_once)

    def plan(subject: Subject) -> Opened:
        checkpoint = subject.write(folder / f"{abs(hash(repr(subject)))}")
        found = inspect(checkpoint, subject.options)
        return opened(plan_checkpoint(found, subject.options).plan, "plan.json")

    return plan


@pytest.fixture(scope="module")
def known() -> dict[str, Opened]:
    return {}


def plans_of(fault: Fault, anew: Planned, known: dict[str, Opened], patch: pytest.MonkeyPatch):
    """The plan as it was, made once for each subject, and with the change."""
    key = repr(fault.base)
    if key not in known:
        known[key] = anew(fault.base)
    fault.change(patch)
    return known[key], anew(fault.after or fault.base)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_the_first_lines_name_a_fault(fault: Fault, anew: Planned, known, monkeypatch):
    before, after = plans_of(fault, anew, known, monkeypatch)
    lines = text_lines(compare(before, after), None)
    first = "\n".join(lines[:3])
    assert all(word in first for word in fault.words), first
    assert len(lines) <= 32


@pytest.mark.parametrize("change", HARMLESS, ids=lambda change: change.name.replace(" ", "-"))
def test_harmless_changes_are_none(change: Fault, anew: Planned, known, monkeypatch):
    before, after = plans_of(change, anew, known, monkeypatch)
    found = compare(before, after)
    assert found.empty, text_lines(found, None)
    assert not found.warnings and text_lines(found, None)[0].startswith("no difference")


def test_there_are_enough():
    assert len(FAULTS) >= 25 and len(HARMLESS) >= 10
    assert all(fault.words for fault in FAULTS)
