"""The candidates of a golden configuration as artifacts, and measured on this machine.

In: a record of predicted figures. Out: artifacts in a folder; the same record with what was
measured of them, and the best by that.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sitsc.commands.golden_probe import Ask, probe
from sitsc.core.errors import GoldenError, SitscError
from sitsc.core.golden import (
    Golden,
    GoldenCandidate,
    GoldenMeasured,
    GoldenRejected,
    compile_options,
    read_golden,
)
from sitsc.core.golden_choice import choose, measured_figures

RECORD = "golden.toml"  # in a folder of candidates


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
    ranks = _num_ranks(golden, candidate)
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
        _check(place_of(folder, index), candidate)
    for index, candidate in enumerate(golden.candidates):
        progress("measure", index / len(golden.candidates))
        if reason := too_few(golden, candidate):
            found.append(replace(candidate, not_measured=reason))
            continue
        try:
            made = _measured(golden, candidate, place_of(folder, index), weights)
        except SitscError as error:
            what = f"failed when measured: {error.what}"
            failed.append(GoldenRejected(candidate.name, what, ""))
            continue
        found.append(replace(candidate, not_measured="", measured=made))
    if not found:
        hint = "MODEL or --random-weights has to fit the artifacts; --no-measure only predicts"
        raise GoldenError(f"{failed[0].name} {failed[0].reason}", hint=hint)
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
    on_gpu = not golden.target.startswith("cpu")
    ask = Ask(
        root=str(root),
        num_ranks=_num_ranks(golden, candidate),
        on_gpu=on_gpu,
        random_weights=weights.random,
        weights=str(weights.folder or ""),
        context_tokens=golden.asked.context,
        prompt_tokens=golden.asked.prompt_tokens,
    )
    found, outputs = probe(ask), golden.asked.output_tokens
    return GoldenMeasured(
        figures=measured_figures(candidate.predicted, outputs, found.ttft_ms, found.tpot_ms),
        sequences=found.sequences,
        context=found.context,
        weights=weights.name,
        hardware=found.hardware,
        versions=found.versions,
        commit=found.commit,
        date=found.date,
    )


def _num_ranks(golden: Golden, candidate: GoldenCandidate) -> int:
    return compile_options(golden.options | candidate.options).num_ranks
