"""Partitions for people: the ranked table, what was refused, crossovers, limits, a plot of text.

In: a report. Out: text on stdout, or the bytes of a PNG.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sitsc.commands.output import bytes_text, table_lines
from sitsc.commands.png_plot import Series, scatter
from sitsc.partition_pipeline import Candidate, Load, Report, Slo

if TYPE_CHECKING:
    from rich.table import Table

_BAR, _PLOT_WIDTH, _PLOT_HEIGHT, _WIDTH = 12, 64, 14, 170
_HEADER = (
    "",
    "partition",
    "idle TTFT ms",
    "TPOT ms",
    "loaded",
    "tokens/s",
    "a device",
    "sequences",
)
_HEADER += ("KV tokens", "link", "bubble", "limits", "kept up to")
_MARKS = "123456789abcdefghijklmnopqrstuvwxyz"


def show(report: Report, most: int) -> None:
    """Print all sections; tables have at most `most` rows."""
    from rich.console import Console  # noqa: PLC0415  (a tenth of a second)

    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _WIDTH)
    print("\n".join(_facts(report)))
    console.print(_ranked(report, most))
    sections = [_notes(report, most), _answers(report), _rejected(report, most)]
    sections += [_memory(report, most), _cuts(report), _operators(report), _plot(report)]
    print("\n".join(line for lines in sections if lines for line in (*lines, "")).rstrip())


def _facts(report: Report) -> list[str]:
    load = report.found.workload
    return [
        f"model      {report.model}",
        f"devices    {report.found.devices} × {report.target}, {report.topology}",
        f"workload   prompts of {load.prompt_tokens} tokens, {load.output_tokens} out, "
        f"{load.asked}",
        f"limits     {report.found.slo.text()}",
        f"prediction {report.calibration}",
    ]


def _ranked(report: Report, most: int) -> "Table":
    from rich.table import Table  # noqa: PLC0415

    table = Table()
    for index, name in enumerate(_HEADER):
        justify = "left" if index == 1 else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for index, c in enumerate(report.found.ranked[:most]):
        table.add_row(
            str(index + 1),
            c.partition.text(),
            f"{c.ttft_ms:.1f} ± {100 * c.ttft_error:.0f} %",
            f"{c.tpot_ms:.3f} ± {100 * c.tpot_error:.0f} %",
            f"{c.load.tpot_ms:.3f}",
            f"{c.load.tokens_per_s:.0f}",
            f"{c.load.tokens_per_s / report.found.devices:.0f}",
            _sequences(c.load, c.partition.dp),
            _count(c.kv_tokens) if math.isfinite(c.budget.limit) else "no limit",
            f"{100 * c.comm_share:.0f} %",
            f"{100 * c.bubble:.0f} %",
            *_kept(report, c),
            style="" if c.meets else "dim",
        )
    return table


def _sequences(load: Load, replicas: int) -> str:
    """ "1 or 2 × 8": of each replica × replicas, and how many requests find no room."""
    fewest = load.sequences // replicas
    each = str(fewest) if fewest == load.batch else f"{fewest} or {load.batch}"
    return f"{each} × {replicas}" + (f", {load.waiting} wait" if load.waiting else "")


def _notes(report: Report, most: int) -> list[str]:
    left = len(report.found.ranked) - most
    more = [f"and {left} more: --top {len(report.found.ranked)}"] if left > 0 else []
    limits = "limits: of idle TTFT and loaded TPOT, with what was asked; kept up to so many at once"
    return [
        *more,
        "idle TTFT: of a prompt on an idle replica, under load it also waits (sitsc simulate)",
        "TPOT: between tokens of all sequences; loaded, tokens/s: with others' prompts in between",
        *([] if report.found.slo == Slo() else [limits]),
    ]


def _kept(report: Report, c: Candidate) -> tuple[str, str]:
    """Whether the limits are kept, or how many times they are missed; and the most at once."""
    if report.found.slo == Slo():
        return "-", "-"
    return "kept" if c.meets else f"{c.miss:.2f} times", str(c.holds or "-")


def _answers(report: Report) -> list[str]:
    """One line each: where the choice flips, fewest devices, the nearest miss, what to ship."""
    flips = report.found.flips
    shown = [f"from {f.concurrency} at once {f.partition.text()}" for f in flips]
    lines = [f"crossovers  {'; '.join(shown)}"]
    if report.fewest is not None:
        count, one = report.fewest
        devices = "1 device keeps" if count == 1 else f"{count} devices keep"
        asked = f"{one.partition.text()}, {report.found.workload.asked}"
        lines.append(f"fewest      {devices} the limits: {asked}")
    if (miss := report.miss) is not None:
        lines.append(
            f"nearest     {miss.partition.text()} misses the limits by "
            f"{100 * (miss.miss - 1):.1f} %: TTFT {miss.load.ttft_ms:.1f} ms, "
            f"TPOT {miss.load.tpot_ms:.3f} ms with {_sequences(miss.load, miss.partition.dp)}"
        )
    stages, many = " ".join(map(str, report.parallel.stages)), report.parallel.micro_batch
    pieces = "1 micro-batch" if many == 1 else f"{many} micro-batches"
    lines.append(
        f"chosen      {report.best.partition.text()}: stages {stages}, "
        f"{pieces}, chunks of {report.parallel.chunk_tokens}"
    )
    return lines


def _rejected(report: Report, most: int) -> list[str]:
    """Partitions by the reason for which they cannot be."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for r in report.found.rejected:
        reasons.setdefault((r.reason, r.change), []).append(r.partition.text())
    if not reasons:
        return []
    rows = [
        [_few(names), reason, change] for (reason, change), names in list(reasons.items())[:most]
    ]
    left = len(reasons) - most
    more = [f"and {left} more reason{'s' * (left > 1)}"] if left > 0 else []
    return [*table_lines([["refused", "because", "smallest change"], *rows], left=3), *more]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _memory(report: Report, most: int) -> list[str]:
    """A bar for each candidate: weights #, working memory +, KV of the workload =, free dots."""
    rows = []
    for c in report.found.ranked[:most]:
        b = c.budget
        if math.isinf(b.limit):
            continue
        wanted = c.load.batch * report.found.workload.mean_tokens * b.kv_bytes_per_token
        kv = min(wanted, b.limit - b.weights - b.working)
        bar = ""
        for mark, size in (("#", b.weights), ("+", b.working), ("=", kv)):
            bar += mark * round(4 * _BAR * size / b.limit)
        bar = bar[: 4 * _BAR].ljust(4 * _BAR, ".")
        cells = [bytes_text(size) for size in (b.weights, b.working, kv, b.limit)]
        rows.append([c.partition.text(), bar, *cells])
    if not rows:
        return []
    header = ["memory of the fullest device", "# weights + working = KV of the workload"]
    return table_lines([[*header, "weights", "working", "KV", "usable"], *rows], left=2)


def _cuts(report: Report) -> list[str]:
    rows = [
        [
            f"{c.low_tokens} to {c.high_tokens}",
            c.how,
            str(c.chunk_tokens or "-"),
            f"{c.ttft_ms:.1f}",
        ]
        for c in report.parallel.cuts
    ]
    lines = table_lines([["prompts", "cut", "chunk", "TTFT of the longest, ms"], *rows], left=2)
    for g in report.parallel.granularity:
        lines.append(
            f"pieces of {bytes_text(g.message_bytes)} over {g.link}, {g.ranks} ranks: "
            f"{bytes_text(g.best_bytes)} ({bytes_text(g.low_bytes)} to {bytes_text(g.high_bytes)})"
        )
    return lines


def _operators(report: Report) -> list[str]:
    whole = sum(o.us for o in report.ops) or 1.0
    sources = list(dict.fromkeys(o.source for o in report.ops))
    rows = [
        [
            o.name,
            str(o.count),
            f"{o.us:.1f}",
            f"{100 * o.us / whole:.1f} %",
            f"{100 * o.share:.0f} %" if o.limit_us else "-",
            o.bound,
            f"[{sources.index(o.source) + 1}]",
        ]
        for o in report.ops
    ]
    batch = report.best.batch
    header = [f"decode of {batch} sequences, one device of each stage", "calls", "µs", "share"]
    table = table_lines([[*header, "of the limit", "bound by", "source"], *rows], left=1)
    return [*table, *(f"[{i + 1}] {text}" for i, text in enumerate(sources))]


def _count(value: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return str(value)


def _plot(report: Report) -> list[str]:
    """Tokens a second of a device over those of one user; the front as marks, others as dots."""
    most_x = max(p.per_user for p in report.points)
    most_y = max(p.per_device for p in report.points)
    names = list(dict.fromkeys(p.partition.text() for p in report.front))
    grid = [[" "] * _PLOT_WIDTH for _ in range(_PLOT_HEIGHT)]

    def put(x: float, y: float, mark: str) -> None:
        column = min(_PLOT_WIDTH - 1, int(x / most_x * (_PLOT_WIDTH - 1)))
        row = _PLOT_HEIGHT - 1 - min(_PLOT_HEIGHT - 1, int(y / most_y * (_PLOT_HEIGHT - 1)))
        grid[row][column] = mark

    for p in report.points:
        put(p.per_user, p.per_device, "·")
    for p in report.front:
        put(p.per_user, p.per_device, _MARKS[names.index(p.partition.text()) % len(_MARKS)])
    lines = [f"tokens a second of a device, up to {most_y:.0f}"]
    lines += ["|" + "".join(row).rstrip() for row in grid]
    lines.append("+" + "-" * _PLOT_WIDTH)
    lines.append(f" tokens a second of one user, up to {most_x:.0f}")
    marks = [f"{_MARKS[i % len(_MARKS)]} {name}" for i, name in enumerate(names)]
    return [*lines, " the best: " + ", ".join(marks)]


def plot_png(report: Report) -> bytes:
    """The same as a PNG."""
    front = tuple((p.per_user, p.per_device) for p in report.front)
    series = [Series("Pareto front", front, marked=True)]
    for c in report.found.ranked[:9]:
        mine = tuple(
            (p.per_user, p.per_device) for p in report.points if p.partition == c.partition
        )
        series.append(Series(c.partition.text(), mine))
    title = f"{report.model}: {report.found.devices} x {report.target}"
    return scatter(series, title, "tokens/s of one user", "tokens/s of a device")
