"""`sitsc verify`: is an artifact whole and as it was compiled, and does this GPU compute it?"""

from pathlib import Path
from typing import Annotated, Any

import typer

from sitsc.commands.output import (
    Json,
    MemoryLimit,
    phases,
    print_json,
    size_bytes,
    table_lines,
)
from sitsc.core.errors import DeviceError, OptionError, VerifyError

_MARKS = {True: "pass", False: "FAIL", None: "open"}


def verify(
    artifact: Annotated[Path, typer.Argument(help="The folder that sitsc compile wrote.")],
    on_device: Annotated[
        bool, typer.Option("--on-device", help="Also load it and check what this GPU computes.")
    ] = False,
    weights: Annotated[
        Path | None, typer.Option(help="--on-device: the checkpoint of an unpacked artifact.")
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="--on-device: random weights.")
    ] = False,
    memory_limit: MemoryLimit = None,
    as_json: Json = False,
) -> None:
    """Check manifest, plan and the checksum of every file; exit code 1 when one is wrong."""
    from sitsc.core.artifact_problems import find_problems  # noqa: PLC0415  (imports torch)

    if not on_device and (weights or random_weights or memory_limit):
        raise OptionError(
            "--weights, --random-weights and --memory-limit are for --on-device",
            hint="give --on-device too",
        )
    with phases() as shown:
        problems = find_problems(artifact, lambda share: shown.report("checksums", share))
    report: dict[str, Any] = {"artifact": str(artifact), "ok": not problems}
    report["problems"] = [{"file": problem.file, "what": problem.what} for problem in problems]
    findings: list[Any] = []
    if on_device and not problems:
        _one_rank(artifact)
        findings = _on_device(artifact, weights, random_weights, size_bytes(memory_limit))
        report |= _judged(findings)
    if as_json:
        print_json(report)
    elif problems:
        print("\n".join(f"{artifact}: {problem.file} {problem.what}" for problem in problems))
    elif not findings:
        print(f"{artifact}: every file is as it was compiled")
    else:
        print("\n".join([*finding_lines(findings), "", f"{artifact}: {report['summary']}"]))
    if findings and not report["ok"]:
        raise VerifyError(report["summary"], where=artifact.name, hint="see the table above")
    raise typer.Exit(1 if problems else 0)


def _judged(findings: list[Any]) -> dict[str, Any]:
    from dataclasses import asdict  # noqa: PLC0415

    from sitsc.runtime.selftest_findings import failures, summary  # noqa: PLC0415

    return {
        "ok": not failures(findings),
        "summary": summary(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def _one_rank(artifact: Path) -> None:
    """Raises OptionError for an artifact of several ranks, which no process can check alone."""
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (imports torch)

    if (count := open_artifact(artifact).plan.num_ranks) > 1:
        raise OptionError(
            f"--on-device checks one GPU, the artifact is for {count} ranks",
            hint="compile it for one rank, or compare answers with sitsc run --nproc",
        )


def _on_device(root: Path, weights: Path | None, random: bool, limit: int | None) -> list[Any]:
    """Load the artifact and run its self-test. Raises OptionError, DeviceError."""
    import torch  # noqa: PLC0415

    from sitsc.core.artifact import open_artifact  # noqa: PLC0415
    from sitsc.runtime.cuda_selftest import baseline, run_selftest  # noqa: PLC0415
    from sitsc.runtime.loader import GPU, load  # noqa: PLC0415

    target = open_artifact(root).plan.target
    if not target.isa.startswith(GPU):
        raise OptionError(
            f"the artifact is for {target.name}: --on-device checks GPUs",
            hint="leave out --on-device",
        )
    before = baseline() if torch.cuda.is_available() else None
    with phases() as shown:
        shown.report("load", 0.0)
        session = load(
            root,
            weights=weights,
            random_weights=random,
            verify=False,
            memory_limit=limit,
            progress=lambda share: shown.report("load", share),
        )
        if before is None:
            raise DeviceError("no GPU is usable here", hint="verify without --on-device")
        return run_selftest(session, before, lambda share: shown.report("self-test", share))


def finding_lines(findings: list[Any]) -> list[str]:
    """A table: check, what of, judgement, figures and remarks."""
    rows = [("check", "of", "", "figures")]
    for finding in findings:
        figures = ", ".join(f"{k} {_text(k, v)}" for k, v in finding.figures.items())
        note = f"{figures}; {finding.note}" if figures and finding.note else figures or finding.note
        rows.append((finding.check, finding.name, _MARKS[finding.passed], note))
    return table_lines(rows, left=4)


def _text(name: str, value: Any) -> str:
    if name == "difference":
        return f"{100 * value:+.2f} %"
    return f"{value:.2e}" if isinstance(value, float) else str(value)
