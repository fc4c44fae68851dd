"""The plan's partition for people: stages, cuts of prompts, pieces, and what was not chosen.

In: the section `parallel` of a plan. Out: lines; none for a plan of one device that says no more.
"""

from sitsc.commands.output import bytes_text, table_lines
from sitsc.core.plan import Alternative, Parallel

_MOST = 12


def parallel_lines(parallel: Parallel) -> list[str]:
    """Alternatives in order with their predictions, the rest as facts."""
    lines = []
    if len(parallel.stages) > 2:
        lines.append(f"stages from layers {' '.join(map(str, parallel.stages[:-1]))}")
    for cut in parallel.cuts:
        chunk = f" in chunks of {cut.chunk_tokens}" if cut.chunk_tokens else ""
        lines.append(
            f"prompts of {cut.low_tokens} to {cut.high_tokens} tokens: {cut.how}{chunk},"
            f" TTFT up to {cut.ttft_ms:.4g} ms"
        )
    for g in parallel.granularity:
        lines.append(
            f"pieces of {bytes_text(g.message_bytes)} over {g.link}, {g.ranks} ranks: "
            f"{bytes_text(g.best_bytes)} ({bytes_text(g.low_bytes)} to {bytes_text(g.high_bytes)})"
        )
    if parallel.alternatives:
        header = ["not chosen", "because", "TTFT ms", "TPOT ms", "tokens/s", "KV tokens"]
        shown = sorted(parallel.alternatives, key=lambda a: not a.feasible)[:_MOST]
        lines += table_lines([header, *map(_row, shown)], left=2)
        if (more := len(parallel.alternatives) - len(shown)) > 0:
            lines.append(f"and {more} more: --json")
    return lines


def _row(a: Alternative) -> list[str]:
    name = f"TP {a.tp} × PP {a.pp} × EP {a.ep} × DP {a.dp}"
    if not a.feasible:
        return [name, f"{a.reason}: {a.change}" if a.change else a.reason, *[""] * 4]
    figures = [f"{a.ttft_ms:.1f}", f"{a.tpot_ms:.3f}", f"{a.tokens_per_s:.0f}", str(a.kv_tokens)]
    return [name, a.reason, *figures]
