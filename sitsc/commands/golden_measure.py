"""The candidates of a golden configuration as artifacts, and measured on this machine.

In: a record of predicted figures. Out: artifacts in a folder; the same record with what
`sitsc bench` measures of them, and the best by that. One rank on the CPU is measured in this
process, everything else by a `sitsc bench` of its own.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sitsc.core.actual import TPOT, TTFT, Actual, Measured, read_actual
from sitsc.core.errors import ExecutionError, GoldenError, OptionError, SitscError
from sitsc.core.golden import (
    Golden,
    GoldenCandidate,
    GoldenMeasured,
    GoldenRejected,
    compile_options,
    read_golden,
)
from sitsc.core.golden_choice import choose, measured_figures

if TYPE_CHECKING:
    from sitsc.core.plan import Plan

RECORD = "golden.toml"  # in a folder of candidates
STEPS, REPEATS = 48, 3
_WARM_STEPS = 8


@dataclass(frozen=True, slots=True)
class Weights:
    """Which weights are measured: random ones, or those of a checkpoint (None: as compiled)."""

    random: bool
    folder: Path | None = None

    @property
    def name(self) -> str:
        """As the record has it."""
        return "random" if self.random else "checkpoint"


def place_of(folder: Path, index: int) -> Path:
    """Where the artifact of a candidate lies."""
    return folder / f"candidate-{index + 1}.sitsc"


def compile_candidates(
    golden: Golden,
    model: Path,
    folder: Path,
    weights: Weights,
    progress: Callable[[str, float], None],
) -> None:
    """An artifact of each candidate, with the record beside them. Raises SitscError."""
    from sitsc.core.disk import disk_errors  # noqa: PLC0415
    from sitsc.core.plan_file import write_text  # noqa: PLC0415
    from sitsc.pipeline import compile_model  # noqa: PLC0415  (imports torch: a second)

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for index, candidate in enumerate(golden.candidates):
        options = compile_options(golden.options | candidate.options)
        if weights.random:
            options = replace(options, pack=False)
        compile_model(model, place_of(folder, index), options, progress)
    write_text(folder / RECORD, golden.text())


def read_candidates(folder: Path) -> Golden:
    """The record of a folder of candidates. Raises GoldenError."""
    try:
        text = (folder / RECORD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = "name a folder that sitsc golden --candidates wrote"
        raise GoldenError(f"no candidates in {folder}: {error}", hint=hint) from None
    return read_golden(text, f"{folder.name}/{RECORD}")


# --- what this machine can do -------------------------------------------------------------------


def why_not(target: str) -> str:
    """Why nothing of a target can be measured here; "" when it can. Raises TargetError."""
    from sitsc.core.hardware import load_target  # noqa: PLC0415

    if load_target(target).cuda is None:
        return ""
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        return "no GPU is usable on this machine"
    name = torch.cuda.get_device_name()
    return "" if target in name.replace(" ", "").lower() else f"the GPU here is {name}"


def too_few(golden: Golden, candidate: GoldenCandidate) -> str:
    """What a candidate needs more than this machine has, or ""."""
    ranks = compile_options(golden.options | candidate.options).num_ranks
    if golden.target.startswith("cpu"):
        return ""
    import torch  # noqa: PLC0415

    have = torch.cuda.device_count()
    return f"needs {ranks} GPUs, this machine has {have}" if have < ranks else ""


# --- measuring ----------------------------------------------------------------------------------


def measure(
    golden: Golden, folder: Path, weights: Weights, progress: Callable[[str, float], None]
) -> Golden:
    """The record with measured figures, and the best by them chosen.

    What fails when measured is rejected; what needs more GPUs keeps its predicted figures. Raises
    GoldenError when nothing is left that keeps the limits, and for artifacts of another record.
    """
    found: list[GoldenCandidate] = []
    failed: list[GoldenRejected] = []
    for index, candidate in enumerate(golden.candidates):
        progress("measure", index / len(golden.candidates))
        _check(place_of(folder, index), candidate)
        if reason := too_few(golden, candidate):
            found.append(replace(candidate, not_measured=reason))
            continue
        try:
            made = _measured(golden, candidate, place_of(folder, index), weights)
        except SitscError as error:
            failed.append(GoldenRejected(candidate.name, f"failed when measured: {error}", ""))
            continue
        found.append(replace(candidate, not_measured="", measured=made))
    if not found:
        raise GoldenError(f"{failed[0].name} {failed[0].reason}", hint="--no-measure predicts only")
    return choose(replace(golden, rejected=(*failed, *golden.rejected)), found)


def _check(root: Path, candidate: GoldenCandidate) -> None:
    """Raises GoldenError for an artifact that does not run the candidate's plan."""
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (imports torch)

    if open_artifact(root).manifest.plan != candidate.plan:
        what = f"{root.name} has another plan than {candidate.name}"
        raise GoldenError(what, where=root.parent.name, hint="sitsc golden --candidates again")


def _measured(
    golden: Golden, candidate: GoldenCandidate, root: Path, weights: Weights
) -> GoldenMeasured:
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (imports torch)

    plan = open_artifact(root).plan
    alone = plan.num_ranks == 1 and golden.target.startswith("cpu")
    actual = (_here if alone else _benched)(golden, plan, root, weights)
    tpot, ttft = _point(actual, TPOT), _point(actual, TTFT)
    outputs = golden.asked.output_tokens
    return GoldenMeasured(
        figures=measured_figures(candidate.predicted, outputs, ttft.value, tpot.value),
        sequences=tpot.sequences,
        context=tpot.context,
        weights=weights.name,
        hardware=actual.hardware,
        versions=actual.versions,
        commit=actual.commit,
        date=actual.date,
    )


def _point(actual: Actual, kind: str) -> Measured:
    found = next((point for point in actual.points if point.kind == kind), None)
    if found is None:
        raise ExecutionError(f"sitsc bench has no {kind.upper()}: its sizes do not fit the plan")
    return found


def _sizes(golden: Golden, plan: "Plan") -> tuple[int, int]:
    """Sequences, and the tokens before each: about the workload's mean, or what fits the pool."""
    from sitsc.runtime.engine_measure import decode_steps  # noqa: PLC0415  (imports torch)

    own = plan.of_rank(0)
    batch, page = own.schedule.max_batch, own.kv[0].page_tokens
    context = max(1, golden.asked.context - STEPS // 2 - _WARM_STEPS)
    while True:
        try:
            decode_steps(own, batch, context, STEPS)
        except OptionError:
            if context <= 1:
                raise
            context = max(1, context - page)
            continue
        return batch, context


def _here(golden: Golden, plan: "Plan", root: Path, weights: Weights) -> Actual:
    """One rank on the CPU, through the engine."""
    from sitsc.commands.bench import environment  # noqa: PLC0415
    from sitsc.core.actual import SCHEMA  # noqa: PLC0415
    from sitsc.runtime.engine_measure import measure_tpot, measure_ttft  # noqa: PLC0415
    from sitsc.runtime.loader import load  # noqa: PLC0415

    batch, context = _sizes(golden, plan)
    session = load(root, weights=weights.folder, random_weights=weights.random)
    tpot = measure_tpot(session, batch, context, STEPS)
    ttft = measure_ttft(session, golden.asked.prompt_tokens, REPEATS)
    session.close()
    facts = environment()
    points = (
        Measured("tpot", TPOT, tpot.tpot_ms, sequences=batch, context=tpot.mean_context),
        Measured("ttft", TTFT, ttft.median_ms, tokens=ttft.tokens),
    )
    named = (root.stem, plan.target.name, facts["hardware"], facts["versions"], facts["commit"])
    digests = (plan.sha256(), plan.runs())
    return Actual(SCHEMA, *digests, *named, facts["date"], points, None, ())


def _benched(golden: Golden, plan: "Plan", root: Path, weights: Weights) -> Actual:
    """A `sitsc bench` of its own: a GPU is empty for each, ranks are processes anyway."""
    batch, context = _sizes(golden, plan)
    command = [sys.executable, "-m", "sitsc.cli", "bench", str(root), "--json"]
    sizes = {"batch": batch, "context": context, "prompt": golden.asked.prompt_tokens}
    for name, size in (sizes | {"steps": STEPS}).items():
        command += [f"--{name}", str(size)]
    if plan.num_ranks > 1:
        command += ["--nproc", str(plan.num_ranks)]
    if not golden.target.startswith("cpu"):
        command += ["--quick", "--random-weights"] if weights.random else ["--quick"]
        command += ["--weights", str(weights.folder)] if weights.folder else []
    with tempfile.TemporaryDirectory(prefix="sitsc-golden-") as folder:
        place = Path(folder) / "actual.json"
        command += ["--actual", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ExecutionError(last.removeprefix("sitsc: "))
        return read_actual(place)
