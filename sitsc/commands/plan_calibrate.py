"""`sitsc plan calibrate`: measured results become the numbers that a target is predicted with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sitsc.commands.output import Json, phases, print_json
from sitsc.commands.tune import model_folder
from sitsc.core.disk import disk_errors

if TYPE_CHECKING:
    from sitsc.core.actual import Actual


def calibrate(
    target: Annotated[str, typer.Argument(help="The GPU that was measured, such as h200.")],
    results: Annotated[
        list[Path],
        typer.Argument(help="Artifacts that were measured, actual.json or results files."),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The table; the target's own by default.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Leave out the points that the table has so far.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Fit the shares of TARGET's ceilings that its kernels reach, and write them as data.

    Models are presets, or folders of checkpoints: what `sitsc bench --model` called them.
    """
    from sitsc.calibration_pipeline import calibrate as fit  # noqa: PLC0415  (imports torch)
    from sitsc.calibration_pipeline import check_target  # noqa: PLC0415
    from sitsc.commands.calibration_view import lines  # noqa: PLC0415
    from sitsc.core.calibration import calibration_file, calibration_text  # noqa: PLC0415
    from sitsc.core.options import CompileOptions  # noqa: PLC0415
    from sitsc.core.records import to_value  # noqa: PLC0415
    from sitsc.partition_pipeline import record_model  # noqa: PLC0415

    check_target(target)
    found = [read(place) for place in results]

    with phases() as shown:

        def record(model: str) -> Any:
            with model_folder(model) as folder:
                return record_model(folder, CompileOptions(target=target), shown.report)

        made = fit(target, found, record, fresh=fresh)
        shown.end()
    path = out or calibration_file(target)
    with disk_errors(path):
        path.write_text(calibration_text(made))
    if as_json:
        print_json(to_value(made))
        return
    print("\n".join([*lines(made), f"written to {path.name}"]))


def read(place: Path) -> "Actual":
    """The measurements of an artifact or of a file. Raises SitscError."""
    from sitsc.core.actual import actual_place, read_actual  # noqa: PLC0415

    return read_actual(actual_place(place) if place.is_dir() else place)
