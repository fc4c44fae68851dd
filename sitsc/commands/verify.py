"""`sitsc verify`: is an artifact whole, and is it what was compiled?"""

from pathlib import Path
from typing import Annotated

import typer

from sitsc.commands.output import Json, phases, print_json


def verify(
    artifact: Annotated[Path, typer.Argument(help="The folder that sitsc compile wrote.")],
    as_json: Json = False,
) -> None:
    """Check manifest, plan and the checksum of every file; exit code 1 when one is wrong."""
    from sitsc.core.artifact_problems import find_problems  # noqa: PLC0415  (imports torch)

    with phases() as shown:
        problems = find_problems(artifact, lambda share: shown.report("checksums", share))
    if as_json:
        found = [{"file": problem.file, "what": problem.what} for problem in problems]
        print_json({"artifact": str(artifact), "ok": not problems, "problems": found})
    elif not problems:
        print(f"{artifact}: every file is as it was compiled")
    else:
        print("\n".join(f"{artifact}: {problem.file} {problem.what}" for problem in problems))
    raise typer.Exit(1 if problems else 0)
