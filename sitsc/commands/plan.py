"""`sitsc plan`: `show`, a plan as text for people or as it is; the others have their own files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sitsc.commands import plan_calibrate, plan_diff, plan_explain, plan_make
from sitsc.commands.output import Json, print_json
from sitsc.core import plan_file
from sitsc.core.errors import OptionError, PlanError

if TYPE_CHECKING:
    from sitsc.core.plan import Plan

app = typer.Typer(help="Plans: what an artifact will execute, predicted and explained.")
app.command("calibrate")(plan_calibrate.calibrate)
app.command("diff")(plan_diff.diff)
app.command("explain")(plan_explain.explain)
app.command("make")(plan_make.make)


@app.command("show")
def show(
    artifact: Annotated[Path, typer.Argument(help="An artifact, or a plan.json.")],
    regime: Annotated[
        list[str] | None,
        typer.Option(help="Kernels of this regime, such as decode_4; repeatable."),
    ] = None,
    actual: Annotated[
        bool, typer.Option("--actual", help="What sitsc bench measured, beside the predictions.")
    ] = False,
    actual_from: Annotated[
        Path | None, typer.Option(help="The same, from this file and not from beside the artifact.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a plan executes, what it costs and what is predicted."""
    if (actual or actual_from) and regime:
        raise OptionError("--regime beside --actual", hint="leave one out")
    plan = read(artifact)
    if actual or actual_from:
        _show_actual(plan, artifact, actual_from, as_json)
        return
    try:
        text = plan.text()
    except ValueError as error:  # a number that has no text: not as sitsc writes it
        hint = "compile again; the file was edited or damaged"
        raise PlanError(str(error), where=artifact.name, hint=hint) from None
    if as_json:
        print(text, end="")
        return
    from sitsc.commands.plan_view import plan_lines  # noqa: PLC0415  (imports torch)

    print("\n".join(plan_lines(plan, tuple(regime or ()))))


def _show_actual(plan: "Plan", artifact: Path, file: Path | None, as_json: bool) -> None:
    from sitsc.actual_pipeline import read_actual, residuals  # noqa: PLC0415  (imports torch)
    from sitsc.commands.actual_view import actual_lines, actual_value  # noqa: PLC0415
    from sitsc.core.actual import actual_place  # noqa: PLC0415

    measured = read_actual(file or actual_place(artifact))
    found = residuals(plan, measured)
    if as_json:
        print_json(actual_value(measured, found))
        return
    print("\n".join(actual_lines(measured, found)))


def read(place: Path) -> "Plan":
    """The plan of an artifact or of a file. Raises SitscError."""
    from sitsc.core.artifact import open_artifact  # noqa: PLC0415  (imports torch)
    from sitsc.core.plan import read_plan  # noqa: PLC0415

    if not place.is_file():
        return open_artifact(place).plan
    return read_plan(plan_file.read_text(place), place.name)
