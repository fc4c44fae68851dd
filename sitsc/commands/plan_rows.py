"""The table of a regime: what computes each operator, what else a step launches, and how long.

In: a regime. Out: lines. The times of the rows add up to that of the step, a greedy one.
"""

from collections.abc import Iterator, Sequence

from sitsc.commands.output import bytes_text, count_text, table_lines
from sitsc.core.plan import KernelRow, LaunchGroup, Regime, greedy

_HEADER = ("kernel", "operator", "by", "layers", "count", "bytes", "FLOPs", "µs", "share")
# Groups of launches that belong to no operator: around the model, and the first of later stages.
_OTHERS = {"place": "tokens of the last step", "receive": "values of the last stage"}
_OTHERS |= {"sample": "sampling", "next": "the next step"}
_LEAST_SHARE = 1e-6


def kernel_lines(regime: Regime) -> list[str]:
    """The table, the longest first, and all together at the end."""
    return table_lines([_HEADER, *_cells(regime)], left=4)


def _cells(regime: Regime) -> Iterator[tuple[str, ...]]:
    whole, rows = regime.predicted_us or 1.0, table_rows(regime)
    for row in sorted(rows, key=lambda row: -row.predicted_us):
        yield (
            row.name,
            row.op,
            row.by,
            row.layer_class or "-",
            str(row.count),
            bytes_text(row.bytes),
            count_text(row.flops),
            f"{row.predicted_us:.1f}",
            f"{100 * row.predicted_us / whole:.1f} %",
        )
    yield (
        "together",
        *("", "", ""),
        str(sum(row.count for row in rows)),
        bytes_text(sum(row.bytes for row in rows)),
        count_text(sum(row.flops for row in rows)),
        f"{regime.predicted_us:.1f}",
        "",
    )


def table_rows(regime: Regime) -> list[KernelRow]:
    """The operators of a regime, what a greedy step launches for none, and its idle time."""
    others = [_other(group) for group in regime.groups if group.name in _OTHERS]
    waiting = regime.predicted_us - _launched_us(regime.groups)
    if regime.kind == "prefill" and waiting > _LEAST_SHARE * regime.predicted_us:
        by = "one launch after the other"
        others.append(KernelRow("waiting for the host", "-", by, "", 0, 0, 0, waiting))
    return [*regime.kernels, *others]


def _other(group: LaunchGroup) -> KernelRow:
    launches = group.launches
    by = " + ".join(dict.fromkeys(launch.template for launch in launches))
    nbytes, flops = sum(x.bytes for x in launches), sum(x.flops for x in launches)
    us = _launched_us([group])
    return KernelRow(_OTHERS[group.name], "-", by, "", len(launches), nbytes, flops, us)


def _launched_us(groups: Sequence[LaunchGroup]) -> float:
    """What a greedy step launches, one after the other."""
    return sum(
        launch.predicted_us * max(1, len(group.layers))
        for group in greedy(groups)
        for launch in group.launches
    )
