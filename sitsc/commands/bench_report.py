"""What `sitsc bench` says of a GPU: rows by key, beside a peer and the limit of the hardware.

Keys are "bs8_ctx128" (milliseconds a token), "ttft_512" (milliseconds) and "start_s" (seconds from
the start of a process to its first token), the same in every file, so that a comparison is a
look-up.
"""

import re
from dataclasses import dataclass
from typing import Any

_ROW = re.compile(r"bs\d+_ctx\d+|ttft_\d+|start_s")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure; `limit` is what the hardware would allow, `step` the executor alone."""

    key: str
    value: float
    limit: float | None = None
    step: float | None = None
    peer: float | None = None

    @property
    def fraction(self) -> float | None:
        """The share of the limit that is reached."""
        return None if self.limit is None else self.limit / self.value

    @property
    def speedup(self) -> float | None:
        """How many times as fast as the peer."""
        return None if self.peer is None else self.peer / self.value


def decode_key(batch: int, context: int) -> str:
    """The key of a decode row."""
    return f"bs{batch}_ctx{context}"


def ttft_key(tokens: int) -> str:
    """The key of a prefill row."""
    return f"ttft_{tokens}"


def peer_figures(peers: dict[str, Any], model: str) -> dict[str, dict[str, float]]:
    """By engine, the rows that a peers file has of a model; other engines are left out."""
    found = {}
    for engine, models in peers.items():
        rows = models.get(model) if isinstance(models, dict) else None
        if isinstance(rows, dict):
            figures = {k: v for k, v in rows.items() if _ROW.fullmatch(k) and _number(v)}
            if figures:
                found[engine] = figures
    return found


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def start_phases(start: dict[str, Any]) -> dict[str, float]:
    """The timeline of a start, loading apart in its phases; they sum to the whole."""
    phases: dict[str, float] = {}
    for name, seconds in start["timeline_s"].items():
        if name == "load":
            inside = {f"load: {k}": v for k, v in start["load_s"].items()}
            phases |= inside | {"load: other": seconds - sum(inside.values())}
        else:
            phases[name] = seconds
    return phases


def table_rows(rows: list[Row], skipped: dict[str, str]) -> list[tuple[str, ...]]:
    """Cells of the table, without its header; skipped rows say why."""
    cells = [
        (
            row.key,
            _figure(row.value),
            _figure(row.step),
            _figure(row.limit),
            "" if row.fraction is None else f"{row.fraction:.2f}",
            _figure(row.peer),
            "" if row.speedup is None else f"{row.speedup:.2f}x",
        )
        for row in rows
    ]
    return cells + [(key, "skipped", why, "", "", "", "") for key, why in skipped.items()]


HEADER = ("row", "measured", "step alone", "limit", "of limit", "peer", "against it")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:.1f}"


def report_value(
    model: str,
    facts: dict[str, Any],
    rows: list[Row],
    skipped: dict[str, str],
    peers: dict[str, dict[str, float]],
    detail: dict[str, Any],
) -> dict[str, Any]:
    """The results file: sitsc[model][key] beside the same of each peer, then what lies behind."""
    value: dict[str, Any] = {
        "about": "sitsc bench: the engine, greedy, token-id prompts; TPOT and TTFT in ms, start "
        "in s; step_ms is a decode step replayed without the engine",
        "model": model,
        "sitsc": {model: {row.key: round(row.value, 4) for row in rows}},
        "step_ms": {row.key: round(row.step, 4) for row in rows if row.step is not None},
        "limit": {row.key: round(row.limit, 4) for row in rows if row.limit is not None},
        "fraction_of_limit": {
            row.key: round(row.fraction, 4) for row in rows if row.fraction is not None
        },
        "skipped": skipped,
        "detail": detail,
    }
    value |= {engine: {model: figures} for engine, figures in peers.items()}
    return facts | value
