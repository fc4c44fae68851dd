"""`sitsc plan diff` of two folders: every pair of plans, in one verdict.

In: two folders and a policy. Out: what changed of which plan as text, Markdown or a JSON value. A
plan that is gone, or can no longer be made, is outside of any policy.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sitsc.commands import plan_diff_view as view
from sitsc.core.diff import folders
from sitsc.core.diff.change import PlanDiff
from sitsc.core.diff.compare import compare
from sitsc.core.diff.read import Opened, open_plan
from sitsc.core.diff_policy import Verdict, unknown_name

Judge = Callable[[PlanDiff, Opened], Verdict | None]


@dataclass(frozen=True, slots=True)
class Compared:
    """One name of both folders: a comparison, or in words what else became of it."""

    name: str
    diff: PlanDiff | None
    verdict: Verdict | None
    text: str
    outside: bool


def compare_folders(a: Path, b: Path, judge: Judge, *, judged: bool) -> tuple[list[Compared], int]:
    """All that changed, and how many are as before; `judged`: whether there is a policy.

    Raises SitscError.
    """
    found, same = [], 0
    for pair in folders.pairs(a, b):
        if pair.a is not None and pair.b is not None and folders.same(pair.a, pair.b):
            same += 1
        elif pair.a is None or pair.b is None or not (pair.a.plan and pair.b.plan):
            for side in (pair.a, pair.b):
                if side is not None and side.plan is not None:
                    open_plan(side.plan)  # raises PlanError for a file that is none
            text, lost = _told(pair)
            found.append(Compared(pair.name, None, None, text, lost and judged))
        else:
            opened = open_plan(pair.a.plan), open_plan(pair.b.plan)
            diff = compare(*opened)
            verdict = judge(diff, opened[1])
            outside = verdict is not None and not verdict.within
            found.append(Compared(pair.name, diff, verdict, view.headline(diff), outside))
    return _without_needed(found), same


def _without_needed(found: list[Compared]) -> list[Compared]:
    """Without remarks on allowances and names that another plan needs."""
    verdicts = [c.verdict for c in found if c.verdict is not None]
    allowed = "\n".join(text for verdict in verdicts for text in verdict.allowed)
    unknown = [set(map(unknown_name, verdict.remarks)) for verdict in verdicts]
    nowhere = set.intersection(*unknown) if unknown else set()
    kept = []
    for item in found:
        verdict = item.verdict
        if verdict is not None:
            remarks = tuple(
                text
                for text in verdict.remarks
                if not _needed(text, allowed) and (not (n := unknown_name(text)) or n in nowhere)
            )
            verdict = replace(verdict, remarks=remarks)
        kept.append(replace(item, verdict=verdict))
    return kept


def _needed(remark: str, allowed: str) -> bool:
    """Whether a remark of `judge` speaks of an allowance whose reason was given elsewhere."""
    reason = remark.removesuffix(") is not needed").partition(" (")[2]
    return remark.endswith(") is not needed") and f": {reason} (until " in allowed


def _told(pair: folders.Pair) -> tuple[str, bool]:
    """What became of a plan, and whether one is lost."""
    a, b = pair.a, pair.b
    if b is None:
        return "gone", a is not None and a.plan is not None
    if a is None:
        return (f"new: no plan, {b.reason}" if b.plan is None else "new"), False
    if b.plan is None:
        if a.plan is not None:
            return f"can no longer be made: {b.reason}", True
        return f"cannot be made for another reason: {a.reason} → {b.reason}", False
    return f"can be made now, and could not before: {a.reason}", False


def summary(found: list[Compared], same: int) -> str:
    """ "2 plans changed, 1 of them outside of the policy; 22 as before"."""
    outside = sum(item.outside for item in found)
    changed = f"{len(found)} plan{'' if len(found) == 1 else 's'} changed"
    worse = f", {outside} of them outside of the policy" if outside else ""
    return f"{changed}{worse}; {same} as before" if found else f"no plan changed; {same} as before"


def text_lines(found: list[Compared], same: int) -> Iterator[str]:
    """A block for each plan that changed, with its causes and what is outside."""
    for item in found:
        if item.diff is None:
            yield f"{item.name}: {item.text}"
            yield from (["outside of the policy: it is lost"] if item.outside else [])
        else:
            head, *rest = view.text_lines(item.diff, item.verdict)
            yield from (f"{item.name}: {head}", *rest)
        yield ""
    yield summary(found, same)


def markdown_lines(found: list[Compared], same: int) -> Iterator[str]:
    """A section for each plan that changed, folded, under a list of them."""
    yield from (f"## Plans: {summary(found, same)}", "")
    for item in found:
        mark = "**outside of the policy**: " if item.outside else ""
        yield f"- `{item.name}`: {mark}{view.escaped(item.text)}"
    for item in found:
        if item.diff is not None:
            yield from ("", f"<details><summary>{item.name}</summary>", "")
            yield from view.markdown_lines(item.diff, item.verdict)
            yield from ("", "</details>")


def value(found: list[Compared], same: int) -> dict[str, Any]:
    """Everything as a JSON value."""
    plans = [
        {
            "name": item.name,
            "text": item.text,
            "outside": item.outside,
            "diff": None if item.diff is None else view.value(item.diff, item.verdict),
        }
        for item in found
    ]
    return {"summary": summary(found, same), "changed": plans, "same": same}
