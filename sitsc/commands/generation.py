"""Loading an artifact and answering one prompt, timed: what `run` and `demo` share.

Out: the text as it comes, and a `Generation` with the timeline from the start of the process.
"""

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sitsc.commands.output import phases
from sitsc.core import env
from sitsc.core.errors import OptionError
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.cuda_warm import warm_up

if TYPE_CHECKING:
    from sitsc.runtime.loader import Session


@dataclass(frozen=True, slots=True)
class Loaded:
    """A session, and the seconds until it was ready by phase: "python" is the process before."""

    session: "Session"
    startup: dict[str, float]


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer and its times: to the first token in ms, then tokens a second (None for one)."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    ttft_ms: float
    tokens_per_s: float | None


def settle_memory() -> None:
    """Let the collector look only at what is made from now on, no more at libraries and the plan.

    A full collection takes tens of milliseconds with torch loaded: several steps of a GPU.
    """
    gc.freeze()


def process_age_s() -> float:
    """Seconds since this process started; 0 where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def load_session(
    artifact: Path,
    weights: Path | None = None,
    verify: bool = True,
    *,
    random_weights: bool = False,
    memory_limit: int | None = None,
) -> Loaded:
    """Load an artifact, timed. Raises SitscError before anything is generated."""
    if weights is not None and not weights.is_dir():
        raise OptionError(f"--weights {weights} is not a folder", hint="name the checkpoint")
    env.num_threads()  # a bad value is told before anything is loaded
    startup = {"python": process_age_s()}
    start = time.perf_counter()
    warm_up(artifact)
    from sitsc.runtime.loader import load  # noqa: PLC0415  (imports torch)

    startup["import"] = time.perf_counter() - start
    with phases() as shown:
        session = load(
            artifact,
            weights=weights,
            random_weights=random_weights,
            verify=verify,
            memory_limit=memory_limit,
            progress=lambda share: shown.report("weights", share),
        )
    startup |= session.timeline
    settle_memory()
    return Loaded(session, startup)


def generate(
    session: "Session",
    prompt: str,
    options: SamplingOptions,
    chat: bool,
    show: Callable[[str], None],
) -> Generation:
    """Answer one prompt; `show` gets the text as it comes. Raises SitscError."""
    if chat:
        prompt = session.chat_prompt([{"role": "user", "content": prompt}])
    start = time.perf_counter()
    first: float | None = None
    text: list[str] = []
    ids: list[int] = []
    reason = ""
    for output in session.engine.generate(prompt, options, add_bos=not chat):
        if output.error is not None:
            raise output.error
        first = first or time.perf_counter()
        text.append(output.new_text)
        ids += output.token_ids
        reason = output.finish_reason or reason
        if output.new_text:
            show(output.new_text)
    end = time.perf_counter()
    first = first or end
    rate = (len(ids) - 1) / (end - first) if len(ids) > 1 else None
    return Generation("".join(text), tuple(ids), reason, 1e3 * (first - start), rate)


def timings(loaded: Loaded, made: Generation) -> dict[str, Any]:
    """The times of a run as plain values, in seconds unless named otherwise."""
    rate = made.tokens_per_s
    beside = loaded.session.beside
    return {
        "startup": {phase: round(seconds, 4) for phase, seconds in loaded.startup.items()},
        "beside": {what: round(seconds, 4) for what, seconds in beside.items()},
        "startup_s": round(sum(loaded.startup.values()), 4),
        "ttft_ms": round(made.ttft_ms, 3),
        "tokens_per_s": None if rate is None else round(rate, 2),
    }


def speed_line(loaded: Loaded, made: Generation) -> str:
    """Tokens and times for people, in one line."""
    rate = f", {made.tokens_per_s:.1f} tokens/s" if made.tokens_per_s is not None else ""
    since = "after the process started" if "python" in loaded.startup else "after the compile"
    return (
        f"{len(made.token_ids)} tokens{rate}, the first after {made.ttft_ms:.0f} ms;"
        f" ready {sum(loaded.startup.values()):.2f} s {since}"
    )
