"""The report of a plan as one HTML page: what the templates in data/pages show, section by section.

In: an opened plan, where measurements may lie, and another plan to compare with. Out: the page.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sitsc.commands import plan_diff_html
from sitsc.commands.output import bytes_text
from sitsc.commands.pages import render
from sitsc.commands.plan_view import fact_rows
from sitsc.commands.report_measured import figures, find, measured, reached
from sitsc.commands.report_memory import arena_plot, device_rows
from sitsc.commands.report_roofline import roofline
from sitsc.commands.report_timeline import timeline
from sitsc.core.diff.change import PlanDiff
from sitsc.core.diff.compare import compare
from sitsc.core.diff.figures import figure_order
from sitsc.core.diff.read import Opened
from sitsc.core.diff.view import spans
from sitsc.core.errors import PlanError
from sitsc.core.plan import Alternative, Plan
from sitsc.core.report.steps import lane_title, lanes, regime_names


def page(
    opened: Opened,
    regimes: Sequence[str] = (),
    beside: Path | None = None,
    actual: Path | None = None,
    before: Opened | None = None,
) -> str:
    """The text of the page. Raises SitscError.

    `regimes` names steps to show, `beside` is where an artifact's measurements lie, `actual` a file
    of them that was named, `before` the plan that this one is compared with.
    """
    plan = _whole(opened)
    names = regime_names(plan, regimes)
    found, why = find(plan, beside, actual)
    compared = None if before is None else compare(before, opened)
    arenas = _arenas(plan, names)
    return render(
        "report.html.j2",
        tabs_most=max(len(names), len(arenas)),
        side=opened.side,
        facts=fact_rows(plan),
        digests=(("plan", opened.side.plan), ("runs", opened.side.runs)),
        figures=_figures(plan),
        names=names,
        sizes={name: _sizes(plan, name) for name in names},
        roofline=roofline(plan, names, reached(found)),
        devices=device_rows(plan),
        arenas_of=arenas,
        timelines_of={name: timeline(plan, name) for name in names},
        parallel=_parallel(plan),
        measured=measured(found, why),
        diff=None if compared is None else _diff(compared),
    )


def _whole(opened: Opened) -> Plan:
    """Raises PlanError for a plan of another schema that can only be read in part."""
    if opened.unread:
        missing = ", ".join(sorted(opened.unread))
        raise PlanError(
            f"plan schema {opened.schema}: {missing} cannot be read",
            where=opened.side.name,
            hint="compile again; sitsc plan diff compares the rest",
        )
    return opened.plan


def _diff(compared: PlanDiff) -> dict[str, Any]:
    return plan_diff_html.shown(compared, None) | {"a": compared.a, "b": compared.b}


def _figures(plan: Plan) -> list[tuple[str, str, str]]:
    order = sorted(figures(plan), key=lambda row: figure_order(row[0]))
    tokens = [g.page_tokens * plan.memory.kv_pages for g in plan.kv]
    tokens += [g.page_tokens * s.memory.kv_pages for s in plan.stages for g in s.kv]
    more = [("memory of a device", bytes_text(plan.memory.total_bytes), "")]
    more += [("KV tokens", f"{min(tokens):,}".replace(",", " "), "")] if tokens else []
    return [*order, *more]


def _sizes(plan: Plan, name: str) -> str:
    """The sizes that a regime is predicted for."""
    every = plan.regimes or plan.stages[0].regimes
    sizes = next(regime.sizes for regime in every if regime.name == name)
    if "sequences" not in sizes or "context" not in sizes:
        return ", ".join(f"{key} {value}" for key, value in sizes.items()) or "fixed sizes"
    sequences, tokens = sizes["sequences"], sizes["tokens"]
    new = f"{tokens} new token{'s' if tokens > 1 else ''}"
    return f"up to {sequences} sequence{'s' if sequences > 1 else ''}, {new}, {_before(sizes)}"


def _before(sizes: dict[str, int]) -> str:
    return f"{sizes['context']} before each" if sizes["context"] else "none before"


def _arenas(plan: Plan, names: Sequence[str]) -> list[dict[str, Any]]:
    """The arena of each regime, and of several stages each that is not like another's."""
    found = []
    for name in names:
        plots: list[tuple[dict[str, Any], list[int]]] = []
        for stage in range(max(1, len(plan.stages))):
            plot = arena_plot(plan, name, stage)
            alike = next((stages for other, stages in plots if other == plot), None)
            if alike is None:
                plots.append((plot, [stage]))
            else:
                alike.append(stage)
        for plot, stages in plots:
            word = "stages" if len(stages) > 1 else "stage"
            of = f", {word} {spans(stages).replace(' ', ', ')}" if len(plan.stages) > 1 else ""
            found.append({"title": name + of} | plot)
    return found


def _parallel(plan: Plan) -> dict[str, Any]:
    parallel = plan.parallel
    ranked = sorted(parallel.alternatives, key=lambda a: not a.feasible)
    return {
        "chosen": f"TP {parallel.tp} × PP {parallel.pp} × EP {parallel.ep} × DP {parallel.dp}",
        "ranks": len(plan.ranks),
        "micro_batch": parallel.micro_batch,
        "chunk": parallel.chunk_tokens,
        "rows": [_alternative(a) for a in ranked],
        "stages": _stages(plan),
        "cuts": [
            (
                f"{cut.low_tokens} to {cut.high_tokens} tokens",
                cut.how,
                f"chunks of {cut.chunk_tokens}" if cut.chunk_tokens else "",
                f"{cut.ttft_ms:.4g} ms",
            )
            for cut in parallel.cuts
        ],
        "pieces": [
            (
                bytes_text(g.message_bytes),
                f"{g.link}, {g.ranks} ranks",
                bytes_text(g.best_bytes),
                f"{bytes_text(g.low_bytes)} to {bytes_text(g.high_bytes)}",
            )
            for g in parallel.granularity
        ],
    }


def _stages(plan: Plan) -> list[str]:
    """Titles of the stages, none where one rank runs all."""
    if not plan.stages:
        return []
    return [lane_title(plan, lane) for lane in lanes(plan, plan.stages[0].regimes[0].name)]


def _alternative(a: Alternative) -> dict[str, Any]:
    name = f"TP {a.tp} × PP {a.pp} × EP {a.ep} × DP {a.dp}"
    if not a.feasible:
        why = f"{a.reason}: {a.change}" if a.change else a.reason
        return {"name": name, "why": why, "feasible": False, "cells": ("–",) * 4}
    cells = (
        f"{a.ttft_ms:.1f} ms",
        f"{a.tpot_ms:.3f} ms",
        f"{a.tokens_per_s:.0f}",
        f"{a.kv_tokens}",
    )
    return {"name": name, "why": a.reason, "feasible": True, "cells": cells}
