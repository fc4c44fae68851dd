"""`sitsc report`: all that a plan says, and what was measured of it, as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer

from sitsc.commands.output import Json, bytes_text, print_json
from sitsc.core.errors import OptionError


def report(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or a plan (.json, .json.xz).")],
    now: Annotated[
        Path | None,
        typer.Argument(help="Another: the report is of this one, compared with the first."),
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path(
        "report.html"
    ),
    against: Annotated[
        Path | None, typer.Option(help="Compare with this artifact or plan, as it was before.")
    ] = None,
    regime: Annotated[
        list[str] | None,
        typer.Option(help="Show this step, such as decode_4; repeatable."),
    ] = None,
    actual_from: Annotated[
        Path | None,
        typer.Option(help="Measurements from this file and not from beside the artifact."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page: rooflines, memory, timelines, partitions, measurements, differences."""
    if now is not None and against is not None:
        raise OptionError("two plans beside --against", hint="leave one out")
    shown, before = (artifact, against) if now is None else (now, artifact)
    _check_place(out, shown, before)
    from sitsc.commands.pages import write_page  # noqa: PLC0415  (Jinja2)
    from sitsc.commands.report_page import page  # noqa: PLC0415  (imports torch)
    from sitsc.core.actual import actual_place  # noqa: PLC0415
    from sitsc.core.diff.read import open_plan  # noqa: PLC0415

    opened = open_plan(shown)
    text = page(
        opened,
        tuple(regime or ()),
        actual_place(shown) if shown.is_dir() else None,
        actual_from,
        None if before is None else open_plan(before),
    )
    write_page(out, text)
    size = out.stat().st_size
    if as_json:
        print_json({"files": {str(out): size}})
    else:
        print(f"{out}: {bytes_text(size)}")


def _check_place(out: Path, *plans: Path | None) -> None:
    """Raises OptionError where the page would replace or alter what it is made from."""
    if out.is_dir():
        raise OptionError(f"-o {out} is a folder", hint=f"-o {out / 'report.html'}")
    for plan in plans:
        if plan is None:
            continue
        if out.resolve() == plan.resolve():
            raise OptionError(f"-o {out} is the plan itself", hint="-o report.html")
        if plan.is_dir() and out.resolve().is_relative_to(plan.resolve()):
            raise OptionError(f"-o {out} lies in the artifact", hint="artifacts are checksummed")
