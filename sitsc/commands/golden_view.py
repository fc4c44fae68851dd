"""What `sitsc golden` prints: candidates with their figures, what was rejected, and why."""

from datetime import date
from typing import Any

from sitsc.commands.output import bytes_text, table_lines
from sitsc.core.golden import Figures, Golden
from sitsc.core.records import to_value

_HEADER = ["candidate", "memory", "TTFT ms", "TPOT ms", "loaded", "tokens/s", "± TPOT", "figures"]
_SHOWN = 6


def lines(golden: Golden) -> list[str]:
    """A record for people."""
    rows = [_HEADER]
    for index, one in enumerate(golden.candidates):
        mark = "*" if index == golden.chosen else " "
        error = f"{100 * one.tpot_error:.0f} %"
        memory = bytes_text(one.memory_bytes)
        rows.append([f"{mark} {one.name}", memory, *_cells(one.predicted), error, "predicted"])
        if one.measured is not None:
            own = one.measured
            rows.append(["", "", *_cells(own.figures), "", f"measured, {own.weights} weights"])
    best, found = golden.best, table_lines(rows, left=1)
    found += ["", f"chosen      {best.name} ({golden.status}; {golden.asked.slo_text()})"]
    found += [f"options     {_options(golden)}"]
    if best.replicas > 1:
        found.append(f"replicas    {best.replicas} of the artifact, each with its own devices")
    if best.measured is not None:
        own = best.measured
        versions = ", ".join(f"{name} {text}" for name, text in sorted(own.versions.items()))
        found.append(f"measured    on {own.hardware} ({versions}), {own.date}")
    found += _not_measured(golden)
    for item in golden.rejected[:_SHOWN]:
        change = f" ({item.change})" if item.change else ""
        found.append(f"rejected    {item.name}: {item.reason}{change}")
    if (more := len(golden.rejected) - _SHOWN) > 0:
        found.append(f"            and {more} more in the file")
    return [*found, f"expires     {golden.expires}"]


def _cells(figures: Figures) -> list[str]:
    times = (figures.ttft_ms, figures.tpot_ms, figures.loaded_tpot_ms)
    return [*(f"{ms:.4g}" for ms in times), f"{figures.tokens_per_s:.5g}"]


def _not_measured(golden: Golden) -> list[str]:
    """Why candidates have no measured figures; one line where all have the same reason."""
    why = {one.name: one.not_measured for one in golden.candidates if one.measured is None}
    reasons = set(why.values())
    if len(why) == len(golden.candidates) and len(reasons) == 1:
        return [f"unmeasured  {reasons.pop()}"]
    return [f"unmeasured  {name}: {reason}" for name, reason in why.items()]


def _options(golden: Golden) -> str:
    """What the chosen candidate has of its own, as options of sitsc compile."""
    own = golden.best.options
    usual = {"tp": 1, "pp": 1, "ep": 1}
    return " ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in sorted(own.items())
        if usual.get(name) != value
    )


def golden_value(golden: Golden) -> dict[str, Any]:
    """The record as one JSON value."""
    return _plain(to_value(golden)) | {"status": golden.status, "name": golden.best.name}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, date) else value
