"""A comparison of plans for people and programs: one screen of text, Markdown, a JSON value.

In: a `PlanDiff` and the verdict of a policy, if there is one. Out: lines. The first line says what
is worse or better, the next ones why: decisions in the order in which one follows from another.
"""

from collections.abc import Iterator
from typing import Any

from sitsc.commands.output import bytes_text, table_lines
from sitsc.core.diff.change import Change, Figure, PlanDiff, Side
from sitsc.core.diff_policy import Verdict
from sitsc.core.records import to_value

_MOST_OF_A_SECTION, _MOST_CHANGES, _MOST_FIGURES, _WIDTH = 3, 8, 7, 120
_MOST_OUTSIDE = 6
_MEMORY, _TOTAL, _TIMES = "memory.", "memory.total", 10


# --- what is worse or better in one line ----------------------------------------------------------


def headline(diff: PlanDiff) -> str:
    """The verdict of the figures: "worse: TPOT +12.4 % (decode_1); better: KV tokens +3.0 %"."""
    if diff.empty and not diff.skipped:
        same = diff.a.runs == diff.b.runs
        return "no difference" + ("" if same else " that matters: names, order or places differ")
    worst = sorted(_worst(diff), key=lambda figure: -abs(figure.relative))
    parts = []
    for word, wanted in (("worse", True), ("better", False)):
        found = [_figure_words(f, diff) for f in worst if (f.worse > 0) == wanted]
        parts += [f"{word}: {', '.join(found)}"] if found else []
    count = len(diff.changes)
    if not parts:
        part = {"predictions", "sizes"} & diff.skipped.keys()
        same = "figures that can be compared are as before" if part else "figures as before"
        parts = [same] if diff.figures else ["no figure can be compared"]
    return "; ".join([*parts, f"{count} decision{' differs' if count == 1 else 's differ'}"])


def _worst(diff: PlanDiff) -> Iterator[Figure]:
    """Of each group the figure that changed most; throughput only where TPOT is silent."""
    groups: dict[str, Figure] = {}
    for figure in diff.figures:
        old = groups.get(figure.group)
        total = figure.name == _TOTAL
        if figure.changed and (old is None or total or _larger(figure, old)):
            groups[figure.group] = figure
    if "TPOT" in groups:
        groups.pop("throughput", None)
    yield from groups.values()


def _larger(figure: Figure, old: Figure) -> bool:
    return old.name != _TOTAL and abs(figure.relative) > abs(old.relative)


def _figure_words(figure: Figure, diff: PlanDiff) -> str:
    """ "TPOT +12.4 % (decode_1)", "memory +3.0 % (arena)": the bucket, or what of memory it is."""
    part = figure.name.partition("_")[2] if figure.group in ("TPOT", "TTFT") else ""
    if figure.group == "memory":
        parts = [f for f in diff.figures if f.name.startswith(_MEMORY) and f.name != _TOTAL]
        named = [figure] if figure.name != _TOTAL else parts
        most = max(named, key=lambda f: abs(f.after - f.before))
        part = most.name.removeprefix(_MEMORY)
    return f"{figure.group} {percent(figure.relative)}" + (f" ({part})" if part else "")


def percent(share: float) -> str:
    """+12.4 %; of small ones two digits that count, so that none looks like nothing."""
    value = 100 * share
    if value == 0:
        return "as before"
    if share >= _TIMES:
        return f"× {1 + share:.4g}"
    return f"{value:+.1f} %" if abs(value) >= 0.1 else f"{value:+.2g} %"


# --- text -----------------------------------------------------------------------------------------


def text_lines(diff: PlanDiff, verdict: Verdict | None) -> list[str]:
    """At most a screen: the first changes of each section, the figures that changed most."""
    lines = [headline(diff), *_change_lines(diff)]
    if figures := _shown(diff):
        lines += ["", *table_lines([("figure", "A", "B", "change", "error"), *map(_row, figures)])]
        hidden = sum(f.changed for f in diff.figures) - len(figures)
        lines += [f"and {hidden} more: --json"] if hidden > 0 else []
    lines += ["", *_remarks(diff, verdict, _MOST_OUTSIDE)]
    return [*lines, *(_side(letter, side) for letter, side in (("A", diff.a), ("B", diff.b)))]


def _change_lines(diff: PlanDiff) -> list[str]:
    sections: dict[str, list[Change]] = {}
    for change in diff.changes:
        sections.setdefault(change.section, []).append(change)
    lines: list[str] = []
    left = _MOST_CHANGES
    for name, changes in sections.items():
        shown = changes[: min(_MOST_OF_A_SECTION, max(1, left))]
        left -= len(shown)
        lines += [_cut(change.text) for change in shown]
        more = len(changes) - len(shown)
        if more:
            lines[-1] += f" (and {more} more of {name}: --json)"
    return lines


def _cut(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 1] + "…"


def _shown(diff: PlanDiff) -> list[Figure]:
    """Changed figures: of each group the one that changed most, then others by their change."""
    first = list(_worst(diff))
    rest = [f for f in diff.figures if f.changed and f not in first]
    rest.sort(key=lambda figure: -abs(figure.relative))
    wanted = {f.name for f in [*first, *rest][:_MOST_FIGURES]}
    return [figure for figure in diff.figures if figure.name in wanted]


def _row(figure: Figure) -> tuple[str, ...]:
    before, after = (amount(figure, value) for value in (figure.before, figure.after))
    error = f"± {100 * figure.error:.0f} %" if figure.error else ""
    error += ", within" if figure.within_error else ""
    moved = percent(figure.relative) if figure.before else "from nothing"
    return figure.name, before, after, moved, error


def amount(figure: Figure, value: float) -> str:
    """A value with its unit."""
    if figure.unit == "bytes":
        return bytes_text(value)
    return f"{value:.6g} {figure.unit}" if figure.unit == "tokens" else f"{value:.4g} {figure.unit}"


def _remarks(diff: PlanDiff, verdict: Verdict | None, most: int = 0) -> Iterator[str]:
    """What was not compared, warnings, the policy's verdict; `most` of what is outside, 0: all."""
    for why in dict.fromkeys(diff.skipped.values()):
        names = [name for name, reason in diff.skipped.items() if reason == why]
        yield f"not compared: {', '.join(names)}, because {why}"
    yield from (f"warning: {text}" for text in diff.warnings)
    if verdict is None:
        return
    shown = verdict.outside[:most] if most else verdict.outside
    yield from (f"outside of the policy: {text}" for text in shown)
    if len(shown) < len(verdict.outside):
        yield f"outside of the policy: {len(verdict.outside) - len(shown)} more, --json has all"
    yield from (f"allowed: {text}" for text in verdict.allowed)
    yield from (f"policy: {text}" for text in verdict.remarks)
    if verdict.within:
        yield "within the policy"


def _side(letter: str, side: Side) -> str:
    runs = f", runs {side.runs[:12]}" if side.runs else ""
    return f"{letter}  {side.name}: {side.model} for {side.target}, plan {side.plan[:12]}{runs}"


# --- Markdown and JSON ----------------------------------------------------------------------------


def markdown_lines(diff: PlanDiff, verdict: Verdict | None) -> list[str]:
    """Everything, as a comment on a pull request."""
    lines = [f"### {escaped(headline(diff))}", ""]
    if verdict is not None:
        lines += [f"**{'Within' if verdict.within else 'Outside of'} the policy.**", ""]
    if diff.changes:
        lines += ["| what | where | A | B |", "|---|---|---|---|"]
        lines += [_table_row(c.title, c.where, c.before, c.after) for c in diff.changes] + [""]
    if changed := [figure for figure in diff.figures if figure.changed]:
        lines += ["| figure | A | B | change | error |", "|---|--:|--:|--:|--:|"]
        lines += [_table_row(*_row(figure)) for figure in changed] + [""]
    lines += [f"- {escaped(text)}" for text in _remarks(diff, verdict)]
    sides = (_side(letter, side) for letter, side in (("A", diff.a), ("B", diff.b)))
    return [*lines, *(f"- {escaped(text)}" for text in sides)]


def _table_row(*cells: str) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


def escaped(text: str) -> str:
    """Text in which Markdown sees no marks."""
    for mark in ("\\", "|", "<", "*", "_", "`"):
        text = text.replace(mark, f"\\{mark}")
    return text


def value(diff: PlanDiff, verdict: Verdict | None) -> dict[str, Any]:
    """Everything as a JSON value; `policy` is null without one."""
    figures = [
        to_value(figure) | {"change": float(f"{figure.relative:.6g}"), "worse": figure.worse > 0}
        for figure in diff.figures
    ]
    policy = None if verdict is None else to_value(verdict) | {"within": verdict.within}
    found = {"headline": headline(diff), "empty": diff.empty, "figures": figures}
    return to_value(diff) | found | {"policy": policy}


def sections(diff: PlanDiff) -> list[tuple[str, list[Change]]]:
    """Changes by section, in order."""
    names = dict.fromkeys(change.section for change in diff.changes)
    return [(name, diff.of(name)) for name in names]


def figure_rows(diff: PlanDiff) -> list[tuple[tuple[str, ...], str]]:
    """Rows of changed figures, each with "worse" or "better"."""
    changed = [figure for figure in diff.figures if figure.changed]
    return [(_row(figure), "worse" if figure.worse > 0 else "better") for figure in changed]


def remarks(diff: PlanDiff, verdict: Verdict | None) -> list[str]:
    """What could not be compared, warnings, and what the policy says, then the two plans."""
    sides = (_side(letter, side) for letter, side in (("A", diff.a), ("B", diff.b)))
    return [*_remarks(diff, verdict), *sides]
