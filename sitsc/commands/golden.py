"""`sitsc golden`: the best full configuration under limits, confirmed by measuring, as a file."""

import tempfile
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sitsc.commands.golden_measure import (
    Weights,
    compile_candidates,
    measure,
    read_candidates,
    why_not,
)
from sitsc.commands.golden_use import check_files, given_on_command_line, read_file
from sitsc.commands.golden_view import golden_value, lines
from sitsc.commands.output import Json, Phases, phases, print_json, remark, workload_text
from sitsc.commands.tune import model_folder
from sitsc.core.errors import ArtifactExistsError, DeviceError, GoldenError, OptionError
from sitsc.core.golden import EXPIRES_DAYS, Golden, without_measuring
from sitsc.core.golden_choice import changes
from sitsc.core.options import CompileOptions
from sitsc.core.plan_file import write_text

if TYPE_CHECKING:
    from sitsc.golden_pipeline import Wish

CHECK = "check"
_STALE = 1  # exit code
_OF_CHECK = {"what", "model", "as_json"}
_OF_MEASURING = {"what", "out", "measure_from", "random_weights", "dry_run", "as_json"}


def golden(
    context: typer.Context,
    what: Annotated[
        list[str] | None,
        typer.Argument(help="A preset or a model; or check and golden files."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The file. [golden/MODEL.TARGET.toml]")
    ] = None,
    target: Annotated[str, typer.Option(help="What to choose for, such as h200:2.")] = "cpu",
    devices: Annotated[int, typer.Option(help="How many devices; or in the target.")] = 1,
    slo: Annotated[str, typer.Option(help="The most milliseconds: ttft=200,tpot=20.")] = "",
    workload: Annotated[
        Path | None, typer.Option(help="A JSON file of prompts and outputs, as of partition.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="As of compile.")] = "auto",
    weights: Annotated[str, typer.Option(help="Weights in int8, where the target can.")] = "none",
    kv_dtype: Annotated[str, typer.Option(help="As of compile.")] = "auto",
    residual: Annotated[str, typer.Option(help="As of compile.")] = "auto",
    max_context: Annotated[int, typer.Option(help="The longest sequence; 0: as compile.")] = 0,
    allow_unknown_key: Annotated[
        list[str] | None, typer.Option(help="A key of config.json to ignore; repeatable.")
    ] = None,
    expires_days: Annotated[int, typer.Option(help="Days until it is stale.")] = EXPIRES_DAYS,
    measured: Annotated[
        bool | None,
        typer.Option("--measure/--no-measure", help="Measure the best three; if possible."),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Measure with random weights.")
    ] = False,
    candidates: Annotated[
        Path | None, typer.Option(help="Only compile the best three into this new folder.")
    ] = None,
    measure_from: Annotated[
        Path | None, typer.Option(help="Only measure such a folder; MODEL gives the weights.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write no file; say what would change.")
    ] = False,
    model: Annotated[str, typer.Option(help="With check: the model to compare with.")] = "",
    as_json: Json = False,
) -> None:
    """Choose the best configuration of MODEL for a target, measure it, and keep it as a file."""
    given = given_on_command_line(context)
    what = what or []
    if what[:1] == [CHECK]:
        _only(given, _OF_CHECK, f"golden {CHECK}")
        _check([Path(name) for name in what[1:]], model, as_json)
        return
    if len(what) > 1 or "model" in given:
        extra = what[1] if len(what) > 1 else "--model"
        hint = f"one model, or sitsc golden {CHECK} with files and --model"
        raise OptionError(f"{extra} is one too many", hint=hint)
    if out is not None and out.is_dir():
        raise OptionError(f"-o {out} is a folder", hint="name a file")
    if measure_from is not None:
        _only(given, _OF_MEASURING, "--measure-from")
        if what and random_weights:
            raise OptionError(f"--random-weights beside {what[0]}", hint="leave one out")
        made = _measure_folder("".join(what), measure_from, random_weights)
        _keep(made, out or _default_out(made.model.name, made), dry_run, as_json)
        return
    if not what:
        raise OptionError("no model", hint="name a preset or a model folder")
    if random_weights and measured is False:
        raise OptionError("--random-weights with --no-measure", hint="leave one out")
    if candidates is not None and given & {"out", "measured", "dry_run"}:
        raise OptionError("--candidates writes no file", hint="--measure-from writes it: -o there")
    options = CompileOptions(
        target=_with_devices(target, devices if "devices" in given else None),
        dtype=dtype,
        weights=weights,
        kv_dtype=kv_dtype,
        residual=residual,
        max_context=max_context,
        allow_unknown_keys=tuple(allow_unknown_key or ()),
    )
    wish = _wish(options, slo, workload)
    reason = "not asked for" if measured is False else "" if candidates else why_not(options.target)
    if measured and reason:
        raise DeviceError(f"--measure: {reason}", hint="leave it out, or --candidates DIR")
    made = _make(what[0], wish, expires_days, reason, random_weights, candidates)
    if candidates is not None:
        _tell(made, as_json, {"candidates": str(candidates)}, f"{candidates}  compiled")
        return
    _keep(made, out or _default_out(what[0], made), dry_run, as_json)


def _only(given: set[str], allowed: set[str], what: str) -> None:
    """Raises OptionError for options that mean nothing here."""
    for name in sorted(given - allowed):
        option = {"measured": "measure"}.get(name, name).replace("_", "-")
        raise OptionError(f"--{option} means nothing with {what}", hint="leave it out")


def _with_devices(target: str, count: int | None) -> str:
    """The target with its devices. Raises OptionError where two say how many."""
    if count is None:
        return target
    if ":" in target:
        raise OptionError(f"--devices {count} beside {target}", hint="say it once")
    return f"{target}:{count}"


def _wish(options: CompileOptions, slo: str, workload: Path | None) -> "Wish":
    from sitsc.golden_pipeline import Slo, Wish, Workload, read_slo, read_workload  # noqa: PLC0415

    load = Workload()
    if workload is not None:
        load = read_workload(workload_text(workload), workload.name)
    return Wish(options, load, read_slo(slo) if slo else Slo())


def _make(
    model: str, wish: "Wish", days: int, reason: str, random: bool, candidates: Path | None
) -> Golden:
    """Choose; compile and measure in a folder of its own, unless `reason` says why not."""
    from sitsc.commands.machine import commit  # noqa: PLC0415
    from sitsc.golden_pipeline import Day, make  # noqa: PLC0415  (imports torch: a second)
    from sitsc.models.presets import PRESETS  # noqa: PLC0415

    if candidates is not None and candidates.exists():
        raise ArtifactExistsError(f"{candidates} exists", hint="choose another --candidates")
    day, preset = Day(date.today(), days, commit()), model in PRESETS and not Path(model).exists()
    name = _stem(model)
    weights = Weights(random or preset)
    with model_folder(model) as folder, phases() as shown:
        made = make(name, folder, wish, day, shown.report, preset=preset)
        if candidates is not None:
            compile_candidates(made, folder, candidates, weights, shown.report)
        elif reason:
            made = without_measuring(made, reason)
        else:
            made = _measured(made, folder, weights, shown)
        shown.end()
    return made


def _measured(made: Golden, model: Path, weights: Weights, shown: Phases) -> Golden:
    with tempfile.TemporaryDirectory(prefix="sitsc-golden-") as folder:
        compile_candidates(made, model, Path(folder), weights, shown.report)
        return measure(made, Path(folder), weights, shown.report)


def _measure_folder(model: str, folder: Path, random: bool) -> Golden:
    """Measure what --candidates compiled, elsewhere perhaps. Raises SitscError."""
    made = read_candidates(folder)
    if reason := why_not(made.target):
        raise DeviceError(f"--measure-from: {reason}", hint=f"run it where an {made.target} is")
    weights = Weights(random, None if random or not model else Path(model))
    with phases() as shown:
        found = measure(made, folder, weights, shown.report)
        shown.end()
    return found


def _stem(model: str) -> str:
    return Path(model).resolve().name.removesuffix(".gguf").removesuffix(".onnx")


def _default_out(model: str, made: Golden) -> Path:
    devices = f"x{made.devices}" if made.devices > 1 else ""
    return Path("golden") / f"{_stem(model)}.{made.target}{devices}.toml"


def _keep(made: Golden, out: Path, dry_run: bool, as_json: bool) -> None:
    """Write the file, and tell what it says otherwise than the one before."""
    differs: list[str] = []
    before = "new"
    if out.exists():
        try:
            differs = changes(read_file(out), made)
            before = "changed" if differs else "as before"
        except GoldenError as error:
            remark(f"{out}: {error}")
            before = "in place of one that cannot be read"
    if not dry_run:
        write_text(out, made.text())
    facts = {"file": str(out), "written": not dry_run, "changes": differs}
    state = f"{before}, not written" if dry_run else before
    _tell(made, as_json, facts, f"{out}  {state}", *(f"change      {text}" for text in differs))


def _tell(made: Golden, as_json: bool, facts: dict[str, Any], *last: str) -> None:
    if as_json:
        print_json(golden_value(made) | facts)
        return
    print("\n".join([*lines(made), *last]))


def _check(files: list[Path], model: str, as_json: bool) -> None:
    """Exit 0 when all are fresh, 1 when one is stale. Raises SitscError."""
    if not files:
        raise OptionError("no golden files to check", hint=f"sitsc golden {CHECK} FILE …")
    found = check_files(files, model)
    if as_json:
        print_json({"files": found})
    for item in [] if as_json else found:
        why = item["not_compared"]
        whole = f"; model and plan not compared: {why}" if why else ""
        state = "; ".join(item["stale"]) if item["stale"] else f"until {item['expires']}"
        kind = "stale" if item["stale"] else "fresh"
        print(f"{item['file']}  {kind}: {state} ({item['status']}{whole})")
    if any(item["stale"] for item in found):
        raise typer.Exit(_STALE)
