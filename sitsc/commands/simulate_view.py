"""A replay for people: latencies, stages and links, pages, prompts by length.

In: a report. Out: text on stdout.
"""

import math
from typing import TYPE_CHECKING

from sitsc.commands.output import table_lines
from sitsc.core.serving.latency import Percentiles
from sitsc.simulate_pipeline import Report

if TYPE_CHECKING:
    from rich.table import Table

_WIDTH = 120


def show(report: Report) -> None:
    """Print all sections."""
    from rich.console import Console  # noqa: PLC0415  (a tenth of a second)

    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _WIDTH)
    print("\n".join(_facts(report)))
    console.print(_latencies(report))
    sections = [_rates(report), _stages(report), _regimes(report)]
    print("\n".join(line for lines in sections if lines for line in (*lines, "")).rstrip())


def _facts(report: Report) -> list[str]:
    serving, limits = report.serving, report.serving.limits
    if report.concurrency:
        load = f"{report.concurrency} at once"
    else:
        load = "all at once" if math.isinf(report.rate) else f"{report.rate:.3g} a second"
    summary = report.summary
    flying = f"{serving.in_flight} step{'s' if serving.in_flight > 1 else ''} in flight"
    chunks = "prompts cut by length, at most" if limits.chunks else "chunks of"
    return [
        f"model      {report.model}",
        f"devices    {report.partition.num_ranks} × {report.target}: {report.partition.text()}",
        f"workload   {summary.requests} requests, {load}; {summary.prompt_tokens} tokens in,"
        f" {summary.output_tokens} out",
        f"replica    {limits.max_batch} sequences, {chunks} {limits.prefill_chunk_tokens},"
        f" {flying}, {serving.num_pages} pages of"
        f" {serving.page_tokens} tokens",
        f"times      {report.times_from}",
    ]


def _latencies(report: Report) -> "Table":
    from rich.table import Table  # noqa: PLC0415

    table = Table()
    table.add_column("ms", no_wrap=True)
    for name in ("p50", "p90", "p99", "max", "mean"):
        table.add_column(name, justify="right", no_wrap=True)
    summary = report.summary
    rows = (("queued", summary.queue_ms), ("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms))
    for name, values in (*rows, ("end to end", summary.e2e_ms)):
        table.add_row(name, *_cells(values))
    return table


def _cells(values: Percentiles) -> list[str]:
    every = (values.p50, values.p90, values.p99, values.max, values.mean)
    return [f"{value:.3f}" if value < 100 else f"{value:.1f}" for value in every]


def _rates(report: Report) -> list[str]:
    s = report.summary
    share = 100 * s.peak_pages / s.kv_pages
    replicas = f"{s.replicas} replica{'s' if s.replicas > 1 else ''}"
    return [
        f"{s.tokens_per_s:.0f} tokens/s, {s.requests_per_s:.2f} requests/s over {s.span_s:.2f} s in"
        f" {s.steps} steps of {replicas}",
        f"of a replica at most {s.peak_pages} of {s.kv_pages} KV pages ({share:.1f} %) and"
        f" {s.most_waiting} requests without any; preemptions: {s.preemptions}",
    ]


def _stages(report: Report) -> list[str]:
    rows = [
        [
            str(index),
            f"{100 * use.busy:.1f} %",
            f"{100 * use.busiest:.1f} %",
            f"{100 * use.comm:.1f} %",
            f"{100 * use.send:.1f} %",
            f"{100 * use.bubble:.1f} %",
        ]
        for index, use in enumerate(report.summary.stages)
    ]
    header = ["stage", "busy", "busiest replica", "sums of ranks", "link", "bubble"]
    return table_lines([header, *rows])


def _regimes(report: Report) -> list[str]:
    if not report.regimes:
        return []
    rows = [
        [
            r.name,
            f"{r.low_tokens} to {r.high_tokens}",
            ", ".join(r.cuts),
            f"{r.planned_ms.p50:.2f}",
            f"{r.planned_ms.p99:.2f}",
            f"{r.fixed_ms.p50:.2f}",
            f"{r.fixed_ms.p99:.2f}",
        ]
        for r in report.regimes
    ]
    fixed = f"chunks of {report.fixed_chunk}: p50"
    header = ["prompts alone", "tokens", "cut by length", "TTFT p50", "p99", fixed, "p99"]
    return table_lines([header, *rows], left=3)
