"""A comparison of plans as one HTML page: no script, nothing from a network, light and dark."""

from typing import Any

from sitsc.commands import plan_diff_view as view
from sitsc.commands.pages import render
from sitsc.core.diff.change import PlanDiff
from sitsc.core.diff_policy import Verdict


def page(diff: PlanDiff, verdict: Verdict | None) -> str:
    """The text of the page."""
    return render("diff.html.j2", tabs_most=0, diff=shown(diff, verdict))


def shown(diff: PlanDiff, verdict: Verdict | None) -> dict[str, Any]:
    """What the templates show of a comparison."""
    return {
        "headline": view.headline(diff),
        "within": None if verdict is None else verdict.within,
        "sections": view.sections(diff),
        "rows": view.figure_rows(diff),
        "remarks": view.remarks(diff, verdict),
    }
