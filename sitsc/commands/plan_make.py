"""`sitsc plan make`: plans without code, weights or devices; how golden plans come to be."""

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sitsc.commands.output import Json, Phases, print_json
from sitsc.core.errors import OptionError, PlanError
from sitsc.core.plan_file import COMPRESSED, NO_PLAN, PLAIN, SUMMARY, write_text

if TYPE_CHECKING:
    from sitsc.plan_pipeline import Made, Wanted

Row = dict[str, Any]


def make(
    models: Annotated[
        list[str] | None, typer.Argument(help="Presets (sitsc models list) or models.")
    ] = None,
    out: Annotated[
        Path, typer.Option("-o", "--out", help="A folder; of one plan a .json or .json.xz file.")
    ] = Path("plans"),
    target: Annotated[
        list[str] | None, typer.Option(help="What to plan for, such as h200:2; repeatable.")
    ] = None,
    listed: Annotated[
        Path | None, typer.Option("--list", help="Models, targets and options as a TOML file.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes; each takes whole models.")] = 1,
    as_json: Json = False,
) -> None:
    """Plan MODELS for each target: NAME.TARGET.json.xz, and NAME.TARGET.txt to read.

    Where there is no plan, the text says why.
    """
    wanted = _wanted(models or [], target or [], listed)
    if jobs < 1:
        raise OptionError(f"--jobs {jobs}", hint="1 or more")
    single = out.name.endswith((PLAIN, COMPRESSED))
    if single and len(wanted) != 1:
        raise OptionError(f"{len(wanted)} plans for one file {out}", hint="give a folder")
    begin, rows = time.perf_counter(), []
    for row in _all(wanted, out, jobs):
        rows.append(row)
        if not as_json:
            print(_line(row), flush=True)
    seconds = round(time.perf_counter() - begin, 1)
    if as_json:
        print_json({"plans": rows, "seconds": seconds})
    elif not single:
        print(f"{len(rows)} plans in {seconds:.0f} s")


def _wanted(models: list[str], targets: list[str], listed: Path | None) -> "list[Wanted]":
    """Raises OptionError."""
    from sitsc import plan_pipeline as pipeline  # noqa: PLC0415  (imports torch: a second)

    if (listed is None) == (not models):
        what = "--list beside models" if models else "nothing to plan"
        raise OptionError(what, hint="name models with --target, or a --list")
    if listed is None:
        return pipeline.wanted(models, targets or ["cpu"], "", {})
    if targets:
        raise OptionError("--target beside --list", hint="the list has targets")
    try:
        text = listed.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--list: {error}", hint="name a TOML file") from None
    return pipeline.read_list(text, listed.name)


def _all(wanted: "list[Wanted]", out: Path, jobs: int) -> Iterator[Row]:
    """All plans; with several processes those of one model at a time, as models are done."""
    models: dict[str, list[Wanted]] = {}
    for item in wanted:
        models.setdefault(item.model, []).append(item)
    jobs = min(jobs, len(models))
    if jobs == 1:
        for items in models.values():
            yield from _of_model(items, out)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(_work, items, out) for items in models.values()]
        for task in as_completed(tasks):
            yield from task.result()


def _work(items: "list[Wanted]", out: Path) -> list[Row]:
    """What another process does."""
    return list(_of_model(items, out))


def _of_model(items: "list[Wanted]", out: Path) -> Iterator[Row]:
    """Make and write the plans of one model. Raises SitscError."""
    from sitsc.commands.tune import model_folder  # noqa: PLC0415
    from sitsc.plan_pipeline import plan_model  # noqa: PLC0415

    phases = [Phases(lambda phase, share: None) for _ in items]
    write = _write_one if out.name.endswith((PLAIN, COMPRESSED)) else _write
    with model_folder(items[0].model) as folder:
        plans = plan_model(folder, items, [one.report for one in phases])
        for made, timed in zip(plans, phases, strict=True):
            timed.report("write", 0.0)
            changed = write(out, made)
            timed.end()
            yield {
                "name": made.name,
                "reason": made.reason,
                "changed": changed,
                "seconds": round(sum(timed.seconds.values()), 2),
                "trace_seconds": round(timed.seconds.get("trace", 0.0), 2),
            }


def _write_one(out: Path, made: "Made") -> bool:
    """Raises PlanError where there is no plan."""
    if made.plan is None:
        raise PlanError(f"no plan: {made.reason}")
    return write_text(out, made.plan.text())


def _write(folder: Path, made: "Made") -> bool:
    """The plan and what it says, or why there is none; whether anything changed."""
    plan, summary = (folder / f"{made.name}{suffix}" for suffix in (COMPRESSED, SUMMARY))
    if made.plan is None:
        gone = plan.exists()
        plan.unlink(missing_ok=True)
        return write_text(summary, f"{NO_PLAN}{made.reason}\n") or gone
    from sitsc.commands.plan_summary import summary_lines  # noqa: PLC0415
    from sitsc.core.plan import read_plan  # noqa: PLC0415

    text = made.plan.text()
    lines = summary_lines(made.name, read_plan(text))  # with the digits that the text has
    changed = write_text(plan, text)
    return write_text(summary, "\n".join(lines) + "\n") or changed


def _line(row: Row) -> str:
    traced = f", {row['trace_seconds']:.1f} to trace" if row["trace_seconds"] >= 1 else ""
    told = "written" if row["changed"] else "as before"
    why = f"; no plan: {row['reason']}" if row["reason"] else ""
    return f"{row['name']:<28} {row['seconds']:6.1f} s{traced}; {told}{why}"
