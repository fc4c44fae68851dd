"""What `sitsc bench` measured of an artifact for the CPU, as the counterpart of its predictions."""

from typing import Any

from sitsc.commands.bench_report import decode_key, ttft_key
from sitsc.core.actual import START, TPOT, TTFT, Actual, Measured, MeasuredMemory, actual_of


def cpu_actual(result: dict[str, Any], model: str, steps: int, facts: dict[str, Any]) -> Actual:
    """One result of the CPU, its `facts` those of the machine and the day."""
    start = result["start"]
    points = [
        Measured(
            decode_key(d["batch"], d["context"]),
            TPOT,
            d["median_ms"],
            sequences=d["batch"],
            context=d["context"] + steps / 2,
        )
        for d in result["decode"]
    ]
    points += [
        Measured(ttft_key(int(n)), TTFT, ms, tokens=int(n)) for n, ms in result["ttft_ms"].items()
    ]
    memory = None
    if "first_token_s" in start:  # of a process of its own, which ranks have not
        seconds, read = start["first_token_s"], start["weights_bytes"]
        points.append(Measured("start_s", START, seconds, weights_bytes=read))
        memory = MeasuredMemory(start["peak_bytes_above_torch"], result["planned_bytes"])
    return actual_of(
        facts,
        digests=(result["plan"], result["runs"]),
        model=model.removesuffix(".sitsc"),
        target=result["target"],
        points=points,
        memory=memory,
    )
