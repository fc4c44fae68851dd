"""`sitsc lint`: what every key, tensor and token of a model is to the compiler."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sitsc.commands.output import Json, print_json, table_lines

if TYPE_CHECKING:
    from sitsc.pipeline import LintReport


def lint(
    model: Annotated[
        Path,
        typer.Argument(
            help="A model folder (config.json and safetensors), a .gguf or a .onnx file."
        ),
    ],
    dtype: Annotated[
        str, typer.Option(help="auto, float32, bfloat16 or float16: look for what it would lose.")
    ] = "auto",
    weights: Annotated[
        bool,
        typer.Option("--weights", help="Read the weights: NaN, and numbers that overflow --dtype."),
    ] = False,
    allow_unknown_key: Annotated[
        list[str] | None, typer.Option(help="A key of config.json to ignore; repeatable.")
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="List every key and what it is.")] = False,
    as_json: Json = False,
) -> None:
    """Check MODEL without compiling it. Exit code 1 when it has an error."""
    from sitsc.pipeline import lint_model  # noqa: PLC0415  (imports torch: a second)

    allow = tuple(allow_unknown_key or ())
    report = lint_model(model, allow, dtype, read_weights=weights)
    if as_json:
        print_json(asdict(report) | {"ok": report.ok})
    else:
        print("\n".join(lines(report, keys=keys)))
    if not report.ok:
        raise typer.Exit(1)


def lines(report: "LintReport", *, keys: bool = False) -> list[str]:
    """The report for people: a table of keys if asked for, counts, one line a finding."""
    shown: list[str] = []
    if keys:
        rows = [("key", "use", "value")]
        rows += [(k.key, k.use, k.value) for k in report.keys]
        shown += [*table_lines(rows, left=3), ""]
    uses: dict[str, int] = {}
    for key in report.keys:
        uses[key.use] = uses.get(key.use, 0) + 1
    shown.append(f"model    {report.model_type}")
    shown.append(f"keys     {_counted(uses)}")
    shown.append(f"tensors  {_counted(report.tensors)}")
    for finding in report.findings:
        place = f" [{finding.where}]" if finding.where else ""
        hint = f" — {finding.hint}" if finding.hint else ""
        shown.append(" ".join(f"{finding.level}: {finding.what}{place}{hint}".split()))
    if report.ok:
        shown.append("ok: nothing speaks against compiling it")
    return shown


def _counted(uses: dict[str, int]) -> str:
    return ", ".join(f"{count} {use}" for use, count in uses.items() if count) or "none"
