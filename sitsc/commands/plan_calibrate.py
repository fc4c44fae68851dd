"""`sitsc plan calibrate`: measured results become the numbers that a target is predicted with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sitsc.commands.output import Json, phases, print_json
from sitsc.commands.tune import model_folder
from sitsc.core.disk import disk_errors
from sitsc.core.errors import OptionError

if TYPE_CHECKING:
    from sitsc.core.actual import Actual
    from sitsc.core.calibration import Calibration


def calibrate(
    target: Annotated[str, typer.Argument(help="What was measured, such as h200 or cpu.")],
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

    Of a GPU models are presets, or folders of checkpoints: what `sitsc bench --model` called them.
    A CPU is calibrated by the artifacts named, all of them at once.
    """
    from sitsc.commands.calibration_view import lines  # noqa: PLC0415  (imports torch)
    from sitsc.core.calibration import calibration_file, calibration_text  # noqa: PLC0415
    from sitsc.core.hardware import load_target  # noqa: PLC0415
    from sitsc.core.records import to_value  # noqa: PLC0415

    made = _of_gpu(target, results, fresh) if load_target(target).cuda else _of_cpu(target, results)
    path = out or calibration_file(target)
    with disk_errors(path):
        path.write_text(calibration_text(made))
    if as_json:
        print_json(to_value(made))
        return
    print("\n".join([*lines(made), f"written to {path.name}"]))


def _of_gpu(target: str, results: list[Path], fresh: bool) -> "Calibration":
    from sitsc.calibration_pipeline import calibrate as fit  # noqa: PLC0415  (imports torch)
    from sitsc.core.options import CompileOptions  # noqa: PLC0415
    from sitsc.partition_pipeline import record_model  # noqa: PLC0415

    found = [read(place) for place in results]
    with phases() as shown:

        def record(model: str) -> Any:
            with model_folder(model) as folder:
                return record_model(folder, CompileOptions(target=target), shown.report)

        made = fit(target, found, record, fresh=fresh)
        shown.end()
    return made


def _of_cpu(target: str, results: list[Path]) -> "Calibration":
    from sitsc.actual_pipeline import check_measured  # noqa: PLC0415  (imports torch)
    from sitsc.commands.plan import read as read_plan  # noqa: PLC0415
    from sitsc.core.hardware import load_target  # noqa: PLC0415
    from sitsc.cpu_calibration import calibrate_cpu  # noqa: PLC0415

    measured = []
    for place in results:
        if not place.is_dir():
            what = f"{place.name} is no artifact: a CPU's measurements need their plan"
            raise OptionError(what, hint="name the folder that sitsc bench measured")
        plan, actual = read_plan(place), read(place)
        if plan.target.name != target:
            what = f"{place.name} is for {plan.target.name}, not {target}"
            raise OptionError(what, hint=f"sitsc plan calibrate {plan.target.name}")
        check_measured(plan, actual)
        measured.append((plan, actual))
    return calibrate_cpu(load_target(target), measured)


def read(place: Path) -> "Actual":
    """The measurements of an artifact or of a file. Raises SitscError."""
    from sitsc.core.actual import actual_place, read_actual  # noqa: PLC0415

    return read_actual(actual_place(place) if place.is_dir() else place)
