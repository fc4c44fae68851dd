"""One candidate of a golden configuration, measured through the engine as `sitsc bench` does.

In: an artifact and sizes. Out: its TTFT and TPOT, and where they come from. `python -m
sitsc.commands.golden_probe ASK ANSWER` does it in a process of its own, or as one of the ranks:
both are JSON files, and rank 0 writes the answer.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sitsc.commands.generation import settle_memory
from sitsc.commands.machine import environment
from sitsc.core.errors import ExecutionError, OptionError, SitscError
from sitsc.core.records import from_value, to_value

if TYPE_CHECKING:
    from sitsc.core.plan import Plan
    from sitsc.runtime.loader import Session

STEPS, REPEATS = 48, 3
_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Ask:
    """What to measure: a prompt, and the full batch with so many tokens before each sequence.

    `weights` is a checkpoint's folder, "" for what the artifact has or names.
    """

    root: str
    num_ranks: int
    on_gpu: bool
    random_weights: bool
    weights: str
    context_tokens: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """Milliseconds; TPOT of `sequences` with `context` tokens each on average.

    `error` is "" or why there are no figures.
    """

    error: str
    ttft_ms: float
    tpot_ms: float
    sequences: int
    context: float
    hardware: str
    versions: dict[str, str]
    commit: str
    date: str


def probe(ask: Ask) -> Answer:
    """Measure, on the CPU in this process, else in others. Raises SitscError."""
    if ask.num_ranks == 1 and not ask.on_gpu:
        return _measured(ask, _load(ask))
    with tempfile.TemporaryDirectory(prefix="sitsc-golden-") as folder:
        files = [Path(folder) / name for name in ("ask.json", "answer.json")]
        files[0].write_text(json.dumps(to_value(ask)))
        command = [sys.executable, "-m", "sitsc.commands.golden_probe", *map(str, files)]
        last = _run(command, ask.num_ranks)
        if not files[1].exists():
            raise ExecutionError(f"the measured process ended without an answer: {last}")
        answer = from_value(Answer, json.loads(files[1].read_text()), "answer")
    if answer.error:
        raise ExecutionError(answer.error)
    return answer


def _run(command: list[str], num_ranks: int) -> str:
    """Run one process or the ranks; the last line of what a lone one said on stderr."""
    if num_ranks > 1:
        from sitsc.runtime.rank_processes import run_ranks  # noqa: PLC0415  (where ranks are)

        return f"code {run_ranks(command, num_ranks)}"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]


def _load(ask: Ask) -> "Session":
    from sitsc.runtime.loader import load  # noqa: PLC0415  (imports torch)

    weights = Path(ask.weights) if ask.weights else None
    return load(ask.root, weights=weights, random_weights=ask.random_weights)


def _measured(ask: Ask, session: "Session") -> Answer:
    from sitsc.runtime.engine_measure import measure_tpot, measure_ttft  # noqa: PLC0415

    batch, context = fitting_sizes(session.artifact.plan, ask.context_tokens)
    tpot = measure_tpot(session, batch, context, STEPS)
    ttft = measure_ttft(session, ask.prompt_tokens, REPEATS)
    session.close()
    facts = environment(ask.on_gpu)
    return Answer(
        error="",
        ttft_ms=ttft.median_ms,
        tpot_ms=tpot.tpot_ms,
        sequences=batch,
        context=tpot.mean_context,
        hardware=facts["hardware"],
        versions=facts["versions"],
        commit=facts["commit"],
        date=facts["date"],
    )


def fitting_sizes(plan: "Plan", context: int) -> tuple[int, int]:
    """Sequences, and the tokens before each for a mean of `context`, or what fits the pool.

    Raises OptionError where nothing does.
    """
    from sitsc.runtime.engine_measure import decode_steps  # noqa: PLC0415  (imports torch)

    batch, page = plan.schedule.max_batch, plan.kv[0].page_tokens
    before = max(1, context - STEPS // 2 - _WARM_STEPS)
    while True:
        try:
            decode_steps(plan, batch, before, STEPS)
        except OptionError:
            if before == 1:
                raise
            before = max(1, before - page)
            continue
        return batch, before


def main(ask_file: str, answer_file: str) -> int:
    """What a process of its own does; the exit code."""
    ask = from_value(Ask, json.loads(Path(ask_file).read_text()), "ask")
    try:
        session = _load(ask)
        if session.follows:
            session.serve()
            return 0
        settle_memory()
        answer = _measured(ask, session)
    except SitscError as error:
        answer = Answer(str(error), 0.0, 0.0, 0, 0.0, "", {}, "", "")
    Path(answer_file).write_text(json.dumps(to_value(answer)))
    return 1 if answer.error else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
